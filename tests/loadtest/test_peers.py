"""Comparisons with peers: the arithmetic is right, a broken run is no result, and no peer's process is left."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer

from cluster.free_port import free_port
from loadtest.commands import main
from loadtest.comparison import engines, peer_servers, serve, soak
from loadtest.comparison.interference import Window
from loadtest.comparison.peer_servers import Peers, Vllm, of_session, write_tokenizer
from loadtest.comparison.peers import Changes, planned
from loadtest.harness.goodput import Load, Outcome
from loadtest.harness.random_checkpoints import make_checkpoint
from loadtest.harness.stats import sparkline
from tandem.errors import SettingsError, Unavailable
from tests.support.waiting import wait_until

# ---- the command line


def test_quick_measures_less_and_the_command_line_has_the_last_word() -> None:
    """What is said on the command line replaces the plan's own numbers and those of --quick."""
    full, quick = planned(Changes()), planned(Changes(quick=True))
    said = planned(Changes(quick=True, concurrency="4", runs=3, threads="2"))
    assert full["serve"].runs >= 5
    assert quick["serve"].ticks < full["serve"].ticks
    assert (said["serve"].concurrency, said["serve"].runs, said["engines"].threads) == ((4,), 3, (2,))
    larger = planned(Changes(shape="Qwen3-0.6B"))
    assert larger["serve"].shapes == larger["engines"].shapes == ("Qwen3-0.6B",)
    assert full["engines"].shapes == ("SmolLM2-135M",), "the engines of both shapes take too long for a default"


@pytest.mark.parametrize(
    "wrong",
    [
        ["speed"],
        ["serve", "--series", "pd,x"],
        ["interference", "--sides", "ours"],
        ["engines", "--engines", "x"],
        ["serve", "--concurrency", "many"],
        ["serve", "--runs", "0"],
        ["serve", "--set", "speed=high"],
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(wrong: list[str]) -> None:
    """Unknown parts, sides and numbers end with exit code 2."""
    assert main(["peers", *wrong]) == 2


# ---- results


def run_of(output: float) -> serve.Run:
    return serve.Run(output, ttft=1.0, tpot=0.02, itl=0.05)


def test_a_ratio_is_of_neighbouring_runs_and_says_whether_the_promise_is_kept() -> None:
    """Each of our runs is divided by theirs of the same round, so that a slow minute hurts both."""
    mine, other = [run_of(n) for n in (30.0, 15.0, 32.0)], [run_of(n) for n in (20.0, 10.0, 20.0)]
    rows = serve.compare("tandem-pd", "vllm-pd", 8, mine, other)
    assert rows[0].ratio.median == 1.5
    assert (rows[0].ratio.low, rows[0].ratio.high) == (1.5, 1.6)
    assert "≥ 1.5: kept" in rows[0].what
    assert "≤ 0.7: NOT KEPT" in rows[1].what  # equal times to first token are not 0.7 times theirs
    assert serve.promised("tandem-pd", "vllm-pd", "output", 1, 9.0) == ""


class Fake(peer_servers.Server):
    """A server that needs no process."""

    frozen_now = 0

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def processes(self) -> list[psutil.Process]:
        return []

    @contextmanager
    def frozen(self) -> Iterator[None]:
        self.frozen_now += 1
        yield
        self.frozen_now -= 1


@pytest.mark.parametrize("series", list(serve.SERIES))
def test_a_series_takes_turns_and_only_one_side_runs_at_a_time(
    series: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A B A B ...; the first round does not count; every other side is frozen meanwhile; each of ours has its rows."""
    order = []

    def load(
        peers: Peers, plan: serve.Plan, server: Fake, others: list[Fake], concurrency: int
    ) -> tuple[serve.Run, dict[str, float]]:
        order.append((concurrency, server.name))
        assert [server.frozen_now, *(one.frozen_now for one in others)] == [0] + [1] * len(others)
        return run_of(10.0 if server.name.startswith("vllm") else 20.0), {one.name: 0.01 for one in others}

    monkeypatch.setattr(serve, "make", lambda side, model, peers: Fake(side, model))
    monkeypatch.setattr(serve, "_load", load)
    monkeypatch.setattr(Peers, "checkpoint", lambda self, shape: tmp_path)
    plan = serve.Plan(shapes=("SmolLM2-135M",), series=(series,), concurrency=(1, 8), runs=2)
    ticks: list[str] = []
    (section,) = serve.run(Peers(None, tmp_path), plan, ticks.append)
    sides = serve.SERIES[series]
    once = [(1, side) for side in sides] + [(8, side) for side in sides]
    assert order == [(8, side) for side in sides] + once * 2
    assert len(ticks) == plan.ticks
    assert len(section.rows) == 2 * len(serve.METRICS) * (len(sides) - 1)
    assert {row.ratio.median for row in section.rows if "output" in row.what} == {2.0}
    assert len(section.details) == 2 * len(sides)


def test_a_run_in_which_requests_failed_is_no_result() -> None:
    """A server that drops half of its requests would look fast."""
    said = {"completed": 8, "total_output_tokens": 512, "output_throughput": 96.0}
    said |= {"median_ttft_ms": 700.0, "median_tpot_ms": 53.0, "p99_itl_ms": 60.0}
    assert serve.read_result(said, 8, 64) == serve.Run(96.0, 0.7, 0.053, 0.06)
    for wrong in ({"completed": 7}, {"total_output_tokens": 500}):
        with pytest.raises(Unavailable, match="requests were finished"):
            serve.read_result(said | wrong, 8, 64)


def test_a_stream_that_still_waits_counts_with_the_time_that_it_has_waited() -> None:
    """Leaving it out would make the worst server look best; what happens outside of the window does not count."""
    early = Outcome(1.0, 8, 8, sent=1.0, times=[2.0, 9.0, 11.0, 12.0], counts=[1, 1, 1, 5], ended=20.0)
    waiting = Outcome(13.0, 8, 8, sent=13.0, ended=20.0)
    long = Outcome(12.0, 8, 8, beside=True, sent=12.0, times=[15.0, 19.0], counts=[1, 1], ended=19.0)
    window = Window.of(Load("", 0.0, 10.0, 10.0, [early, waiting, long]))
    assert window.ttft_worst == window.ttft_mean == 7.0
    assert window.itl_p99 == 8.0  # from 12 s on; the 7 s began before the window
    assert window.throughput == 0.6
    assert window.long_ttft == 3.0


def test_the_best_peer_is_named_and_the_floor_is_a_share() -> None:
    """The promise is about the fastest of the others in each column, whoever that is."""
    sides = {"tandem": [2.0, 2.2], "vllm": [2.0, 2.0], "llama": [1.0, 1.1], "floor": [1.0, 1.0]}
    rows = {row.what: row.ratio.median for row in engines.compare("decode", sides)}
    assert rows["decode: tandem / llama (best peer; ≤ 1.25: NOT KEPT)"] == pytest.approx(2.0)
    assert rows["decode: tandem / vllm"] == pytest.approx(1.05)
    assert 0.4 < rows["decode: floor / tandem"] < 0.5


def test_growth_is_seen_and_noise_is_not() -> None:
    """MiB per 1,000 requests of a line; a memory that moves by less than a MiB is drawn flat."""
    assert soak.slope([0, 500, 1000], [10.0, 12.0, 14.0]) == pytest.approx(4.0)
    assert soak.slope([0, 500, 1000], [10.0, 10.0, 10.0]) == 0.0
    assert sparkline([10.0, 10.05, 10.1]) == "▁▁▁"
    assert sparkline([10.0, 14.0, 18.0]) == "▁▄█"


# ---- checkpoints


def test_every_token_of_the_checkpoint_is_one_word(tmp_path: Path) -> None:
    """Text that a load client makes of random ids is as long in tokens as it was asked for."""
    write_tokenizer(tmp_path, 384)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = [5, 383, 0, 5, 127]
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids


# ---- processes

# Starts a process that its own `stop` ends, one that it forgets, and one that does not listen.
SCRIPT = """
case $1 in
  aggregated) sleep 600 & echo $! > "$PEERS_HOME/pid"; sleep 600 & (trap '' TERM; sleep 600; sleep 600) & ;;
  pd) exit 1 ;;
  stop) kill "$(cat "$PEERS_HOME/pid")" ;;
esac
"""


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peers:
    """A script that stands in for vLLM's, on ports that are free."""
    port = free_port("127.0.0.1", 0, "port")
    monkeypatch.setattr(peer_servers, "VLLM_PORTS", {"aggregated": (port,), "pd": (port,)})
    monkeypatch.setattr(peer_servers, "STOP_TIMEOUT_S", 1.0)
    script = tmp_path / "vllm.sh"
    script.write_text(SCRIPT)
    return Peers(script, tmp_path)


@pytest.fixture
def vllm(peers: Peers) -> Iterator[Vllm]:
    server = Vllm("aggregated", Path("model"), peers)
    server.start()
    yield server
    server.stop()


def test_no_process_of_a_peer_is_left(vllm: Vllm) -> None:
    """Also those that the script's own stop does not know, or that ignore it, and also when they stand still."""
    session = vllm._session
    assert len(of_session(session)) >= 3
    with vllm.frozen():
        vllm.stop()
    assert of_session(session) == []


def stand_still(processes: list[psutil.Process], still: bool = True) -> None:
    """Waits until all are stopped, or none is; a signal arrives a moment after it was sent."""
    wait_until(lambda: {process.status() == psutil.STATUS_STOPPED for process in processes} == {still})


def test_what_is_not_measured_stands_still(vllm: Vllm) -> None:
    """A frozen server uses no CPU: each of its processes is stopped, and goes on afterwards."""
    stand_still(vllm.processes(), still=False)
    with vllm.frozen():
        stand_still(vllm.processes())
    stand_still(vllm.processes(), still=False)


def test_a_peer_that_does_not_start_is_an_error(peers: Peers) -> None:
    """The script's failure, a missing script, and a port that somebody else has, each with a sentence."""
    with pytest.raises(Unavailable, match="did not start"):
        Vllm("pd", Path("model"), peers).start()
    with pytest.raises(SettingsError, match="script"):
        Vllm("pd", Path("model"), Peers(None, peers.home)).start()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", peer_servers.VLLM_PORTS["pd"][0]))
        taken.listen()
        with pytest.raises(SettingsError, match="in use"):
            Vllm("pd", Path("model"), peers).start()


def test_an_engine_answers_in_a_process_of_its_own_and_ends(tmp_path: Path, peers: Peers) -> None:
    """It stands still until it is asked; one that cannot load is an error with its last words."""
    folder = make_checkpoint(tmp_path / "model", "tiny-llama")
    engine = engines.Engine("tandem", peers, folder, 1, tmp_path / "log")
    process = psutil.Process(engine._process.pid)
    stand_still([process])
    seconds, token = engine.prefill([1, 2, 3])
    assert seconds > 0
    assert engine.prefill([1, 2, 3])[1] == token
    assert len(engine.decode([[1, 2], [3, 4]], 3)) == 3
    engine.stop()
    assert not process.is_running()
    with pytest.raises(Unavailable, match="nowhere"):
        engines.Engine("tandem", peers, tmp_path / "nowhere", 1, tmp_path / "log")
