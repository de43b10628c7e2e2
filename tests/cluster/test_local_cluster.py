"""Whole clusters on a real Ray, with a small service in place of engines: they start, heal, scale, and leave nothing.

Slow for this project: a Ray costs some seconds, so tests that can share a cluster do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from cluster import local_cluster, run_directory
from cluster.local_cluster import LocalCluster
from cluster.orphan_reaper import OrphanReaper
from cluster.state.registry import Registry
from cluster.supervision.worker_process import Event
from tandem.errors import CheckpointRefused, DeadlineExceeded, PreconditionFailed, SettingsError
from tandem.settings import Settings
from tests.cluster.fake import LAUNCHER
from tests.support.processes import below, named
from tests.support.waiting import wait_until

BOUND_WORKER = Path(local_cluster.__file__).parent / "local_ray/bound_worker.py"

ROOT = Path(__file__).parents[2]
START_S = 60.0
SOON_S = 90.0
UP = f"""
import sys
from cluster.local_cluster import run_forever
from tandem.settings import Settings
sys.exit(run_forever(Settings(model="fake", port=0), launcher={LAUNCHER!r}))
"""


def settings(**more: object) -> Settings:
    return Settings(model="fake", port=0, drain_grace_s=2.0, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module", autouse=True)
def workers_find_the_fake() -> Iterator[None]:
    """Ray's workers inherit the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


@pytest.fixture(scope="module")
def strangers() -> set[psutil.Process]:
    """Children that existed before the cluster, such as another test file's server."""
    return set(psutil.Process().children(recursive=True))


@pytest.fixture(scope="module")
def cluster(workers_find_the_fake: None, strangers: set[psutil.Process]) -> Iterator[LocalCluster]:
    """One cluster for the tests that leave it unchanged."""
    with LocalCluster(settings(), launcher=LAUNCHER, start_timeout_s=START_S) as running:
        yield running


def until(cluster: LocalCluster, true: Callable[[dict[str, Event]], bool]) -> dict[str, Event]:
    """Waits until the workers fulfil a condition, checked after every event."""
    deadline = time.monotonic() + SOON_S
    while not true(cluster.workers):
        assert time.monotonic() < deadline, cluster.workers
        cluster.events(timeout_s=1.0)
    return cluster.workers


def pid(event: Event) -> int:
    assert event.started
    return event.started.pid


def incarnation(event: Event) -> str:
    assert event.started
    return event.started.incarnation


def want(cluster: LocalCluster, model: str = "", **sizes: int) -> None:
    async def write() -> None:
        name = cluster.settings.cluster + (f".{model}" if model else "")
        registry = Registry(cluster.settings.redis or "", name, 1.0)
        await registry.set_wanted(sizes)
        await registry.close()

    asyncio.run(write())


def kill_supervisor() -> None:
    supervisors = named("SupervisorActor")
    assert len(supervisors) == 1
    supervisors[0].kill()
    psutil.wait_procs(supervisors, timeout=SOON_S)


def answers(target: str) -> bool:
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=30.0).close()
    except OSError:
        return False
    return True


def shared_memory() -> set[str]:
    """Ray's shared memory segments; other programs on this machine have their own."""
    return {name for name in os.listdir("/dev/shm") if "plasma" in name or "ray" in name}


def test_start_serves_on_the_target_and_listens_on_loopback_only(cluster: LocalCluster) -> None:
    """All wanted workers are ready, with no lower priority than other processes, and nothing that was started can be
    reached from another machine."""
    assert set(cluster.workers) == {"router-0", "prefill-0", "decode-0"}
    assert [process.nice() for process in named("Actor")] == [psutil.Process().nice()] * 4  # with the supervisor
    assert cluster.target == f"127.0.0.1:{cluster.settings.port}"
    assert answers(cluster.target)
    for process, connections in below(lambda process: process.net_connections("inet")).items():
        for connection in connections:
            assert connection.laddr.ip.removeprefix("::ffff:") == "127.0.0.1", process


def test_of_ray_only_gcs_and_raylet_run(cluster: LocalCluster) -> None:
    """Instead of Ray's agents, which would import Ray and are not needed here, two scripts without a library run."""
    found = list(below(psutil.Process.cmdline).values())
    of_ray = {Path(words[0]).name for words in found if words and "ray/core/src/ray" in words[0]}
    assert of_ray == {"gcs_server", "raylet"}
    idle = [words for words in found if any(word.endswith("idle_agent.py") for word in words)]
    assert len(idle) == 2
    assert not [words for words in found if words and words[0].endswith("Agent")]
    (raylet,) = [words for words in found if words and words[0].endswith("/raylet")]
    assert any(word.startswith("--python_worker_command=") and str(BOUND_WORKER) in word for word in raylet)


def test_a_worker_of_our_ray_is_what_ray_asks_for_or_nothing(tmp_path: Path) -> None:
    """A Ray worker process runs the script and arguments that Ray passes, in the same process; if it would have to
    prepare an environment it does not start."""
    script = tmp_path / "worker.py"
    script.write_text("import os, sys; print(os.getpid(), sys.argv[1:])")
    asked = [sys.executable, str(BOUND_WORKER), str(script), "--node=a b", "--language=PYTHON"]
    context = "--serialized-runtime-env-context="
    with subprocess.Popen([*asked, f"{context}{{}}"], stdout=subprocess.PIPE, text=True) as started:
        assert started.communicate(timeout=30)[0] == f"{started.pid} ['--node=a b']\n"
    refused = subprocess.run([*asked, f'{context}{{"env_vars": {{}}}}'], capture_output=True, text=True, timeout=30)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "runtime environment" in refused.stderr


@pytest.mark.parametrize("worker_id", ["decode-0", "router-0"])
def test_a_killed_worker_comes_back_with_a_new_incarnation(cluster: LocalCluster, worker_id: str) -> None:
    """After SIGKILL a worker is restarted without help; a router comes back on the same port."""
    before = cluster.workers[worker_id]
    os.kill(pid(before), signal.SIGKILL)
    after = until(cluster, lambda seen: worker_id in seen and pid(seen[worker_id]) != pid(before))[worker_id]
    assert incarnation(after) != incarnation(before)
    assert answers(cluster.target)


def test_a_worker_changes_its_pool_and_keeps_its_process(cluster: LocalCluster) -> None:
    """When one pool has a surplus worker and the other lacks one, no engine is loaded: the same process returns as
    another worker with another incarnation, also under a supervisor that was killed and came back meanwhile. Its state
    is rebuilt from its live workers, which are not affected."""
    want(cluster, decode=2)
    before = until(cluster, lambda seen: "decode-1" in seen)["decode-1"]
    want(cluster, decode=1, prefill=2)
    seen = until(cluster, lambda seen: "prefill-1" in seen)
    turned = seen["prefill-1"]
    assert "decode-1" not in seen
    assert pid(turned) == pid(before)
    assert incarnation(turned) != incarnation(before)
    live = {worker_id: incarnation(event) for worker_id, event in seen.items()}
    assert set(live) == {"router-0", "prefill-0", "prefill-1", "decode-0"}
    kill_supervisor()
    want(cluster, decode=2)  # only a live supervisor does this, and one that knows what is which
    seen = until(cluster, lambda seen: len(seen) == 5)
    assert {worker_id: incarnation(seen[worker_id]) for worker_id in live} == live
    assert seen["prefill-1"].started == turned.started
    want(cluster, decode=3, prefill=1)
    seen = until(cluster, lambda seen: "decode-2" in seen)
    assert pid(seen["decode-2"]) == pid(before)
    want(cluster, decode=1)
    until(cluster, lambda seen: len(seen) == 3)


def test_a_drained_worker_is_replaced(cluster: LocalCluster) -> None:
    """An operator's drain ends a worker, and another one is started for it."""
    before = cluster.workers["prefill-0"]
    assert before.started
    host, _, port = before.started.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=SOON_S) as connection:
        connection.sendall(b"drain\n")
    until(cluster, lambda seen: "prefill-0" in seen and pid(seen["prefill-0"]) != pid(before))


def test_pools_grow_and_shrink_also_after_the_registry_was_killed(cluster: LocalCluster) -> None:
    """The embedded Valkey is restarted empty and filled again by the live processes. A change of the wanted sizes is
    sufficient; the remaining workers are not touched."""
    assert cluster._valkey
    before = cluster._valkey.pid
    assert before
    os.kill(before, signal.SIGKILL)
    deadline = time.monotonic() + SOON_S
    while cluster._valkey.pid == before and time.monotonic() < deadline:
        cluster.events(timeout_s=1.0)
    assert cluster._valkey.pid != before
    kept = incarnation(cluster.workers["decode-0"])
    want(cluster, decode=2)
    process = psutil.Process(pid(until(cluster, lambda seen: "decode-1" in seen)["decode-1"]))
    want(cluster, decode=1)
    seen = until(cluster, lambda seen: "decode-1" not in seen)
    assert incarnation(seen["decode-0"]) == kept
    psutil.wait_procs([process], timeout=SOON_S)
    assert not process.is_running()


def test_stop_leaves_nothing_behind(cluster: LocalCluster, strangers: set[psutil.Process]) -> None:
    """A stop leaves no process, no port and no file, and a second stop changes nothing. The last test of the shared
    cluster."""
    processes, directory = set(psutil.Process().children(recursive=True)) - strangers, cluster.directory
    assert directory
    assert directory.exists()
    cluster.stop()
    cluster.stop()
    assert [process for process in processes if process.is_running()] == []
    assert not directory.exists()
    assert not answers(cluster.target)
    assert shared_memory() == set()


def test_the_pools_of_several_models_are_sized_apart() -> None:
    """Each model has its own supervisor and its own cluster in the registry; one is scaled to zero and back while the
    workers of the other stay the same. At the end nothing is left."""
    models = {"one": {"model": "fake", "decode": 2}, "two": {"model": "fake", "prefill": 0}}
    before = set(psutil.Process().children(recursive=True))
    given = Settings(models=models, port=0, drain_grace_s=2.0)
    with LocalCluster(given, launcher=LAUNCHER, start_timeout_s=START_S) as running:
        others = {"router-0", "two/decode-0"}
        assert set(running.workers) == others | {"one/prefill-0", "one/decode-0", "one/decode-1"}
        kept = {name: incarnation(running.workers[name]) for name in others}
        want(running, "one", prefill=0, decode=0)
        until(running, lambda workers: set(workers) == others)
        want(running, "one", prefill=1, decode=1)
        until(running, lambda workers: set(workers) == others | {"one/prefill-0", "one/decode-0"})
        assert {name: incarnation(running.workers[name]) for name in others} == kept
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_spare_becomes_the_worker_that_is_missing(
    strangers: set[psutil.Process], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A new worker is a process that was prepared before; the next spare follows, and a restarted supervisor knows it.
    A spare that is dead when it is needed is replaced. At the end none is left."""
    monkeypatch.setenv("FAKE_SPARES", str(tmp_path))
    known: set[int] = set()

    def prepared() -> int:
        """The process of a spare that did not exist before."""
        deadline = time.monotonic() + SOON_S
        while not (found := {int(path.name) for path in tmp_path.iterdir()} - known):
            assert time.monotonic() < deadline
            cluster.events(timeout_s=0.1)
        known.update(found)
        assert len(found) == 1
        return found.pop()

    before = set(psutil.Process().children(recursive=True))
    with LocalCluster(settings(spares=1, cluster="spares"), launcher=LAUNCHER, start_timeout_s=START_S) as cluster:
        first = prepared()
        want(cluster, decode=2)
        assert pid(until(cluster, lambda seen: "decode-1" in seen)["decode-1"]) == first
        second = prepared()
        kill_supervisor()
        want(cluster, decode=3)
        assert pid(until(cluster, lambda seen: "decode-2" in seen)["decode-2"]) == second
        third = prepared()
        psutil.Process(third).kill()
        want(cluster, decode=4)
        latest = pid(until(cluster, lambda seen: "decode-3" in seen)["decode-3"])
        assert latest not in known
        known.add(latest)  # perhaps a spare of the moment between the two starts
        fourth = prepared()
    assert not psutil.pid_exists(fourth)
    assert not set(psutil.Process().children(recursive=True)) - before - strangers


def test_a_refusal_ends_the_start_at_once_with_that_error(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """`tandem up` reports the worker's error and does not wait for its timeout. The logs of a failed start are kept,
    and a line says where; nothing else of the run is."""
    monkeypatch.setenv("FAKE_REFUSE", "decode")
    monkeypatch.setattr(run_directory, "_parent", lambda: directory)
    before = set(psutil.Process().children(recursive=True))
    lines: list[str] = []
    with pytest.raises(CheckpointRefused, match="the model fake cannot be served by decode-0") as caught:
        LocalCluster(settings(prefill=0), lines.append, launcher=LAUNCHER, start_timeout_s=START_S).start()
    assert caught.value.field == "model"
    assert set(psutil.Process().children(recursive=True)) <= before
    [kept] = [Path(line.partition("the logs are in ")[2]) for line in lines if "the logs are in" in line]
    assert list(kept.glob("worker-*.err"))
    assert [path.name for path in directory.iterdir()] == [kept.parent.name]


@pytest.mark.parametrize("taken", ["link", "open", "file"])
def test_a_run_directory_that_is_not_private_is_refused(
    monkeypatch: pytest.MonkeyPatch, directory: Path, tmp_path: Path, taken: str
) -> None:
    """The directory's name can be guessed, in a folder where every user may write, so its owner could provide the
    cluster's registry."""
    monkeypatch.setattr(run_directory, "_parent", lambda: directory)
    private = run_directory.create()
    assert run_directory.create() == private
    private.rmdir()
    if taken == "link":
        private.symlink_to(tmp_path)
    elif taken == "open":
        private.mkdir()
        private.chmod(0o777)
    else:
        private.touch()
    with pytest.raises(PreconditionFailed, match="not a private directory"):
        run_directory.create()
    assert private.is_symlink() or private.exists()


def test_a_run_directory_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """With any mode."""
    monkeypatch.setattr(run_directory, "_parent", lambda: directory)
    run_directory.create()
    monkeypatch.setattr(run_directory.os, "getuid", lambda: -1)
    with pytest.raises(PreconditionFailed, match="not a private directory"):
        run_directory.create()


def test_a_killed_runs_directory_is_left_to_its_guard(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Another start, which removes the directories of killed runs, waits for no guard, and takes no logs away that one
    is about to keep."""
    monkeypatch.setattr(run_directory, "_parent", lambda: directory)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    killed = directory / f"tandem-{ended.pid}-1"
    run_directory.logs(killed).mkdir(parents=True)
    (run_directory.logs(killed) / "worker-1.err").touch()
    guard = OrphanReaper(killed, directory / "kept")
    wait_until(lambda: run_directory._is_held(killed), SOON_S)
    run_directory.remove_stale()
    assert killed.exists()
    guard.stop()
    assert [path.name for path in directory.glob("kept/logs-*/*")] == ["worker-1.err"]
    run_directory.logs(killed).mkdir(parents=True)
    run_directory.remove_stale()
    assert not killed.exists()


def test_a_guard_whose_directory_is_gone_ends_the_processes(directory: Path) -> None:
    """Another start may remove the directory of a run that was killed before its guard was up."""
    left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    guard = OrphanReaper(directory / "gone")
    guard.watch([psutil.Process(left.pid)])
    assert guard._process.stdin
    guard._process.stdin.close()  # as `up` would by ending
    try:
        assert left.wait(SOON_S) == -signal.SIGKILL
    finally:
        left.kill()
        guard.stop()  # after the wait: it waits until the processes have gone, and this one's parent is this test


def test_the_logs_of_old_failures_make_room(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """The logs of a cluster that fails at every start do not fill the disk."""
    monkeypatch.setattr(run_directory, "_parent", lambda: directory)
    for number in range(2 * run_directory.MAX_FAILED_RUNS):
        run = directory / f"tandem-{number}-1"
        run_directory.logs(run).mkdir(parents=True)
        assert run_directory.keep_logs(run, run_directory.failed_runs())
        assert run_directory.keep_logs(run, run_directory.failed_runs()) is None
    kept = list(directory.glob("tandem-logs-*/*"))
    assert len(kept) <= run_directory.MAX_FAILED_RUNS
    assert f"logs-{2 * run_directory.MAX_FAILED_RUNS - 1}-1" in {path.name for path in kept}


def test_failures_at_once_make_room_together(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """What one removes is no error of another, whose logs would be lost."""
    monkeypatch.setattr(run_directory, "_parent", lambda: directory)
    kept = run_directory.failed_runs()
    for number in range(300):
        (kept / f"logs-{number}-1").mkdir()
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: run_directory.failed_runs(), range(4))) == {kept}
    assert len(list(kept.iterdir())) < run_directory.MAX_FAILED_RUNS


def test_a_place_for_logs_that_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """The error is one sentence that names the setting."""
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="logs cannot be kept") as caught:
        LocalCluster(settings(logs=tmp_path / "file" / "logs"), launcher=LAUNCHER).start()
    assert caught.value.field == "logs"


def test_a_crash_loop_at_start_ends_with_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose process dies again and again is retried, reported, and not waited for beyond the timeout."""
    monkeypatch.setenv("FAKE_CRASH", "prefill")
    lines: list[str] = []

    def is_said(*parts: str) -> bool:
        return any(all(part in line for part in parts) for line in lines)

    def clock() -> float:  # the time is over once both have happened, however busy the machine is
        both = is_said("prefill-0: died", "starting again in") and is_said("decode-0: ready on ")
        return time.monotonic() + (1000.0 if both else 0.0)

    monkeypatch.setattr(local_cluster, "monotonic", clock)
    with pytest.raises(DeadlineExceeded, match="0 of 1 prefill"):
        LocalCluster(settings(), lines.append, launcher=LAUNCHER, start_timeout_s=90.0).start()
    assert is_said("prefill-0: died", "starting again in"), lines
    of_decode = [line.partition("decode-0: ")[2] for line in lines if "decode-0: " in line]
    stages = [
        line for line in of_decode if not line.startswith(("on ", "Ray has not started"))
    ]  # where it is; a slow start
    assert stages[:2] == ["pretending to load for decode-0", "loaded"]  # how far a start is, up to the last stage
    assert stages[2].startswith("ready on ")


def test_a_port_in_use_is_refused_before_anything_starts() -> None:
    """The error is one sentence that names the setting."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"port {port}") as caught:
            LocalCluster(Settings(model="fake", port=port), launcher=LAUNCHER).start()
    assert caught.value.field == "port"


def test_a_missing_folder_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """No registry and no Ray is started for a path that is not a checkpoint."""
    lines: list[str] = []
    for model in (tmp_path / "missing", tmp_path):
        with pytest.raises(CheckpointRefused, match=str(model)):
            LocalCluster(Settings(model=str(model), port=0), lines.append, launcher=LAUNCHER).start()
    assert lines == []


@pytest.fixture
def ups() -> Iterator[list[subprocess.Popen[str]]]:
    """The `tandem up` processes of a test. Those that a failed test leaves would run during all tests after it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for up in started:
        up.kill()  # its guard ends the rest
        up.communicate()


def start_up(ups: list[subprocess.Popen[str]], *before: str) -> tuple[subprocess.Popen[str], str]:
    """Starts `tandem up` in its own process group, as in a terminal, and returns it with its ready line."""
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, if nohup runs the tests
    try:
        up = subprocess.Popen(
            [*before, sys.executable, "-c", UP],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGHUP, inherited)
    ups.append(up)
    assert up.stdout
    line = up.stdout.readline()
    if not line.startswith("ready "):
        up.kill()
        raise AssertionError(line + "".join(up.communicate()))
    return up, line.split()[1]


def test_ctrl_c_in_a_terminal_drains_and_returns_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ups: list[subprocess.Popen[str]]
) -> None:
    """The signal reaches the whole process group, as from a terminal; the orderly stop still happens, without errors in
    the output. If the logs of every run are requested, they are kept. Under nohup, the end of the terminal ends
    nothing: a SIGHUP that was ignored before the start stays ignored."""
    monkeypatch.setenv("TANDEM_LOGS", str(tmp_path / "kept"))
    up, target = start_up(ups, "nohup")
    processes = psutil.Process(up.pid).children(recursive=True)
    os.killpg(up.pid, signal.SIGHUP)
    assert answers(target)
    os.killpg(up.pid, signal.SIGINT)
    out, err = up.communicate(timeout=SOON_S)
    assert up.returncode == 0, err
    assert out == ""
    for who in ("router-0: stopped", "prefill-0: stopped", "decode-0: stopped", "stopped, nothing is left"):
        assert who in err, err
    assert "cut off" not in err, err
    assert "died" not in err, err
    assert "Traceback" not in err
    assert [process for process in processes if process.is_running()] == []
    assert not answers(target)
    assert list(tmp_path.glob("kept/logs-*/worker-*.err")), err
    assert not list(run_directory._parent().glob(f"tandem-{up.pid}-*"))


def test_the_end_of_the_terminal_drains_and_a_second_signal_ends_the_grace(
    monkeypatch: pytest.MonkeyPatch, ups: list[subprocess.Popen[str]]
) -> None:
    """SIGHUP reaches the whole process group, and the orderly stop still happens; a second signal cuts off a worker
    that needs its whole grace period, and still nothing is left."""
    monkeypatch.setenv("FAKE_BUSY", "decode")
    monkeypatch.setenv("TANDEM_PREFILL", "0")
    up, _ = start_up(ups)
    processes = psutil.Process(up.pid).children(recursive=True)
    assert up.stderr
    os.killpg(up.pid, signal.SIGHUP)
    while "router-0: stopped" not in (line := up.stderr.readline()):
        assert line, "ended after one signal"
    up.terminate()  # the default grace is 30 s, more than this test waits
    _, err = up.communicate(timeout=SOON_S)
    assert up.returncode == 0, err
    assert "died" not in err, err
    assert "cut off" in err
    assert [process for process in processes if process.is_running()] == []
