"""A cluster on three hosts of this machine (namespaces) while their network and one of them fail.

    loss         1 % of the frames of host b are lost
    delay        5 ms each way to host b, 10 ms for a round trip
    slow         1 Gbit/s to host b, prompts of 8,000 tokens
    crawl        20 Mbit/s, so that a transfer takes far longer than any of Tandem's own time limits
    crawl-wall   control of `crawl`: the same with a rule that bounds a transfer by its time, not by its progress
    kill-source  the prefill worker's host is killed while its KV crosses to host b, and joins again
    kill-sink    host b is killed then, and joins again
    ipv6         all hosts know each other by addresses of IPv6
    secured      certificates: the registry by TLS, and calls between hosts by TLS of both sides
    long-cut     both hosts with workers are cut off for 25 s
    return       host b is killed, and joins again by the command of docs/ray.md
    head         the host of Ray's head is lost, with `tandem up` and the router on host a
    home         the host of `tandem up` is lost: Ray ends the workers on the others

Each shows whether the tokens are those of an undisturbed run, the longest silence of a stream, and whether the ledgers
balance afterwards. `loss`, `delay`, `slow`, `crawl`, `ipv6` and `secured` also require that KV has crossed to host b:
by the receipts, and by the bytes that its port of the switch has sent. Needs root, and openssl for `secured`.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Annotated, Any

import typer

from loadtest.harness import certificates
from loadtest.harness.options import names
from loadtest.scenarios.hosts import ray_hosts, wall_time
from loadtest.scenarios.hosts.namespaces import Host, forbidden
from loadtest.scenarios.hosts.ray_hosts import ROOT, RayHosts, Stream
from tandem.errors import TandemError, Unavailable

MODEL = "demo/model"
Settings = Mapping[str, str]
SETTINGS = {
    "TANDEM_DTYPE": "float32",
    "TANDEM_KV_BLOCKS": "2048",
    "TANDEM_LOCAL_PREFILL": "never",
    "TANDEM_THREADS": "1",
    "TANDEM_STREAM_INTERVAL_S": "0",
}
PATIENT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
END_S = 120.0
LONG_CUT_S = 25.0
LONG_PROMPT = 8000
CRAWL = "20mbit"
MOVED_PROMPT, A_PART, A_TRANSFER = 600, 256 << 10, 1_800_000  # tokens; bytes of KV of such a prompt
LONGEST_LIMIT_S = 10.0  # of a probe; a batch of a transfer has 4 s, connecting 5
PLAIN = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 5.0) as connection:
    connection.sendall(b"PING\\r\\n")
    try:
        print(connection.recv(1).hex())
    except ConnectionResetError:
        print()
"""
ALERT = "15"  # of TLS
ACROSS = {"nixl": "nixl:ucx:tcp", "nccl": "gloo:tcp"}
HEADLESS_S = 90.0  # longer than a raylet waits for the head by default
POOL = {"prefill-0", "decode-0", "decode-1"}


class Failure(Exception):
    """A promise that was not kept."""


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(f"{count} {length} {seed}")
    return [[draw.randrange(5, 600) for _ in range(length + index)] for index in range(count)]


def begin(cluster: RayHosts, asked: list[list[int]], new: int, **more: Any) -> list[Stream]:
    options = {"max_tokens": new, "ignore_eos": True, "temperature": 0.0, "timeout": END_S, **more}
    return [cluster.clients.stream(prompt, **options) for prompt in asked]


def finished(cluster: RayHosts, streams: list[Stream]) -> list[list[int]]:
    cluster.clients.until(lambda: all(stream.ended.is_set() for stream in streams), END_S)
    if errors := [stream.error for stream in streams if stream.error]:
        raise Failure(f"{len(errors)} of {len(streams)} streams failed: {errors[0]}")
    return [stream.tokens for stream in streams]


def under(
    cluster: RayHosts, asked: list[list[int]], new: int, fault: Callable[[], object], *, after: int = 20
) -> list[Stream]:
    """The streams of a run in which `fault` happens once each has `after` tokens. Raises Failure if their tokens are
    not those of a run before without it, whose cached prefixes are forgotten."""
    expected = finished(cluster, begin(cluster, asked, new))
    streams = begin(cluster, asked, new)
    cluster.clients.until(lambda: all(len(stream.tokens) >= after for stream in streams), END_S)
    fault()
    if finished(cluster, streams) != expected:
        raise Failure("the tokens differ from those of a run without the fault")
    return streams


def settle(cluster: RayHosts, workers: set[str] = POOL, within_s: float = 90.0) -> None:
    """Until exactly these workers are there with nothing held. Raises Failure."""
    deadline = monotonic() + within_s
    while True:
        audit = cluster.clients.ask("audit")
        ledgers = {ledger["worker_id"]: ledger for ledger in audit["answer"]["ledgers"]}
        if audit["balanced"] and ledgers.keys() == workers and not any(one["held"] for one in ledgers.values()):
            return
        if monotonic() > deadline:
            raise Failure(f"the ledgers do not balance: {audit}")
        sleep(0.2)


def _report(streams: list[Stream]) -> str:
    silence = max(stream.silence_s for stream in streams)
    attempts = max(stream.receipt["attempts"] for stream in streams)
    paths = sorted({stream.receipt["path"] for stream in streams})
    return f"same tokens, longest silence {silence:.2f} s, at most {attempts} attempts, {' and '.join(paths)}"


def through(
    cluster: RayHosts, harm: Callable[[], None], rounds: int, length: int, count: int, new: int
) -> list[Stream]:
    """Streams after `harm`, with the prompts of streams before and another salt, so that KV moves. Raises Failure if
    their tokens differ from those before."""
    asked = [prompts(count, length, seed) for seed in range(rounds)]
    expected = [finished(cluster, begin(cluster, each, new)) for each in asked]
    harm()
    found: list[Stream] = []
    for each, tokens in zip(asked, expected, strict=True):
        found += (streams := begin(cluster, each, new, cache_salt="after"))
        if finished(cluster, streams) != tokens:
            raise Failure("the tokens differ from those before")
    settle(cluster)
    return found


class Crossing:
    """KV that crosses to host b: what receipts say of it, and how many bytes the switch sends there."""

    def __init__(self, cluster: RayHosts) -> None:
        self._cluster = cluster
        self._before = cluster.hosts["b"].received()
        self.longest_s = 0.0

    def of(self, streams: list[Stream]) -> str:
        """Raises Failure if no KV has crossed, or not by the network, or fewer bytes than the receipts say."""
        sent = self._cluster.hosts["b"].received() - self._before
        workers = self._cluster.clients.ask("workers")["answer"]["workers"]
        there = {worker["worker_id"] for worker in workers if worker["node"] == "b"}
        receipts = [stream.receipt for stream in streams if stream.receipt["decode_worker"] in there]
        moved = [receipt["transfer"] for receipt in receipts if receipt["transfer"]]
        said = sum(transfer["bytes"] for transfer in moved)
        over = ACROSS[self._cluster.env["TANDEM_TRANSPORT"]]
        if {transfer["transport"] for transfer in moved} != {over} or not said <= sent:
            raise Failure(f"not {said} bytes over {over} by the receipts and {sent} at the switch: {moved}")
        self.longest_s = max(transfer["seconds"] for transfer in moved)
        return (
            f"{len(moved)} of {len(streams)} transfers to host b over {over}, the longest {self.longest_s:.1f} s, "
            f"{said / 2**20:.0f} MiB by the receipts and {sent / 2**20:.0f} at the switch"
        )


def wired(options: str, settings: Settings) -> str:
    with RayHosts(MODEL, settings, {"b": "delay 0"}) as cluster:
        crossing = Crossing(cluster)
        found = through(cluster, lambda: cluster.hosts["b"].wire(options), 4, length=200, count=8, new=300)
        return f"{_report(found)}; {crossing.of(found)}"


@contextmanager
def _long_model() -> Iterator[str]:
    """The demo model with a longer context than it was trained for: tokens are compared, not read. In the checkout,
    because /tmp is each host's own."""
    with tempfile.TemporaryDirectory(prefix=".long-model-", dir=ROOT) as folder:
        for path in (ROOT / MODEL).iterdir():
            (Path(folder) / path.name).symlink_to(path)
        (config := Path(folder) / "config.json").unlink()
        known = json.loads((ROOT / MODEL / config.name).read_text())
        config.write_text(json.dumps(known | {"max_position_embeddings": 2 * LONG_PROMPT}))
        yield folder


@contextmanager
def _limited(rate: str, rounds: int, settings: Settings) -> Iterator[tuple[list[Stream], Crossing]]:
    """Streams whose KV crosses a link of this rate."""
    with _long_model() as model, RayHosts(model, {**settings, "TANDEM_KV_BLOCKS": "4096"}) as cluster:
        crossing: list[Crossing] = []

        def harm() -> None:
            cluster.hosts["b"].limit(rate)
            crossing.append(Crossing(cluster))

        yield through(cluster, harm, rounds, length=LONG_PROMPT, count=4, new=40), crossing[0]


def slow(settings: Settings) -> str:
    with _limited("1gbit", 3, settings) as (found, crossing):
        return f"{_report(found)}; {crossing.of(found)}"


def crawl(settings: Settings) -> str:
    with _limited(CRAWL, 1, settings) as (found, crossing):
        said = f"{_report(found)}; {crossing.of(found)}"
        if crossing.longest_s < LONGEST_LIMIT_S or any(stream.receipt["attempts"] > 1 for stream in found):
            raise Failure(f"a transfer failed, or none took longer than {LONGEST_LIMIT_S:g} s: {said}")
        return said


@contextmanager
def _wall_time() -> Iterator[dict[str, str]]:
    """The environment in which every process of Python changes Tandem's rule (wall_time.py)."""
    with tempfile.TemporaryDirectory(prefix=".wall-time-", dir=ROOT) as folder:
        (Path(folder) / "sitecustomize.py").write_text(f"import {wall_time.__name__} as rule\n\nrule.install()\n")
        yield {"PYTHONPATH": f"{folder}:{ROOT}"}


def crawl_wall(settings: Settings) -> str:
    try:
        with _wall_time() as env, _limited(CRAWL, 1, {**settings, **env}) as (found, _):
            failed = [note for stream in found for note in stream.receipt["notes"] if wall_time.WHY in note]
            said = f"{_report(found)}; {len(failed)} attempts failed"
    except Failure as error:
        said, failed = str(error), [str(error)] if wall_time.WHY in str(error) else []
    if not failed:
        raise Failure(f"no transfer failed because its time was bounded: {said}")
    return f"fails, as it should: {said}"


def killed(name: str, settings: Settings) -> str:
    """The host `name` is killed when the switch has sent a part of one transfer to host b."""
    with RayHosts(MODEL, settings) as cluster:
        asked = prompts(4, MOVED_PROMPT)
        expected = finished(cluster, begin(cluster, asked, 40))
        nodes = {worker["worker_id"]: worker["node"] for worker in cluster.clients.ask("workers")["answer"]["workers"]}
        cluster.hosts["b"].limit("4mbit")
        before = cluster.hosts["b"].received()
        streams = begin(cluster, asked, 40, cache_salt="after")
        cluster.clients.until(lambda: all(stream.tokens for stream in streams), END_S)
        while (sent := cluster.hosts["b"].received() - before) < A_PART:
            if all(stream.ended.is_set() for stream in streams):
                raise Failure("no KV crossed to host b")
            sleep(0.01)
        if sent >= A_TRANSFER or all(len(stream.tokens) > 1 for stream in streams):
            raise Failure(f"the transfers were over: {sent} bytes")
        cluster.hosts[name].kill()
        if name != "b":
            cluster.hosts["b"].limit("")
        if finished(cluster, streams) != expected:
            raise Failure("the tokens differ from those before")
        settle(cluster, {worker for worker in POOL if nodes[worker] != name})
        cluster.hosts[name].boot()
        cluster.ray_start(name)
        settle(cluster)
        return f"{_report(streams)}; {sent >> 10} KiB of at least {A_TRANSFER >> 10} had crossed"


def ipv6(settings: Settings) -> str:
    with RayHosts(MODEL, settings, ipv6=True) as cluster:
        crossing = Crossing(cluster)
        found = through(cluster, lambda: None, 4, length=200, count=8, new=300)
        addresses = {worker["address"] for worker in cluster.clients.ask("workers")["answer"]["workers"]}
        return f"{_report(found)}; {crossing.of(found)}; {', '.join(sorted(addresses))}"


def secured(settings: Settings) -> str:
    with tempfile.TemporaryDirectory(prefix=".certificates-", dir=ROOT) as folder:
        pems = certificates.make(Path(folder), ray_hosts.AUTHORITY, names=ray_hosts.NAMES)
        with RayHosts(MODEL, settings, secured=pems) as cluster:
            crossing = Crossing(cluster)
            found = through(cluster, lambda: None, 4, length=200, count=8, new=300)
            said = f"{_report(found)}; {crossing.of(found)}"
            workers = cluster.clients.ask("workers")["answer"]["workers"]
            asked = [worker["address"] for worker in workers if worker["role"] != "router"]
            asked.append(f"{cluster.hosts['head'].address}:{cluster.registry_port}")
            answers = {address: _unencrypted(cluster.hosts["b"], address) for address in asked}
            if not set(answers.values()) <= {"", ALERT}:
                raise Failure(f"a call without encryption was answered: {answers}")
            if (inside := _unencrypted(cluster.hosts["head"], f"127.0.0.1:{ray_hosts.INNER_PORT}")) in ("", ALERT):
                raise Failure(f"control: Valkey behind the proxy answered {inside!r}")
            return f"{said}; {len(answers)} addresses answer nothing without encryption"


def _unencrypted(host: Host, address: str) -> str:
    """The first byte of what a server answers to the registry's PING in plain text, in hexadecimal; empty if it closes
    the connection. A gRPC server without TLS would send its settings."""
    return host.do(sys.executable, "-c", PLAIN, *address.rsplit(":", 1)).strip()


def long_cut(settings: Settings) -> str:
    with RayHosts(MODEL, settings) as cluster:

        def cut() -> None:
            for name in ("a", "b"):
                cluster.hosts[name].cut()
            sleep(LONG_CUT_S)
            for name in ("a", "b"):
                cluster.hosts[name].join()

        streams = under(cluster, prompts(6, 30), 1500, cut)
        settle(cluster)
        finished(cluster, again := begin(cluster, prompts(6, 30), 50))  # the same prompts are not refused
        return f"{_report(streams)}; then {_report(again)}"


def returns(settings: Settings) -> str:
    with RayHosts(MODEL, settings) as cluster:
        streams = under(cluster, prompts(6, 30), 1000, cluster.hosts["b"].kill)
        began = monotonic()
        cluster.hosts["b"].boot()
        cluster.ray_start("b")
        settle(cluster)
        took = monotonic() - began
        finished(cluster, begin(cluster, prompts(6, 30, 1), 50))
        return f"{_report(streams)}; its worker served again {took:.1f} s after its host had started"


def head(settings: Settings) -> str:
    with RayHosts(MODEL, {**settings, **PATIENT}, up_on="a") as cluster:
        streams = under(cluster, prompts(6, 30), 2000, cluster.hosts["head"].kill)
        lost, answered = monotonic(), 0
        while monotonic() < lost + HEADLESS_S:
            finished(cluster, begin(cluster, prompts(6, 30, answered), 50))
            answered += 6
        settle(cluster)
        return f"{_report(streams)}; {answered} more requests were answered in {HEADLESS_S:.0f} s without a head"


def home(settings: Settings) -> str:
    with RayHosts(MODEL, {**settings, "TANDEM_DRAIN_GRACE_S": "5"}, up_on="a") as cluster:
        began = monotonic()
        cluster.hosts["a"].kill()
        while "WorkerActor" in cluster.hosts["b"].do("ps", "-eo", "args"):
            if monotonic() > began + END_S:
                raise Failure("workers are left on host b")
            sleep(0.5)
        return f"no worker is left on host b after {monotonic() - began:.1f} s"


SCENARIOS: dict[str, Callable[[Settings], str]] = {
    "loss": partial(wired, "loss 0.01"),
    "delay": partial(wired, "delay 5"),
    "slow": slow,
    "crawl": crawl,
    "crawl-wall": crawl_wall,
    "kill-source": partial(killed, "a"),
    "kill-sink": partial(killed, "b"),
    "ipv6": ipv6,
    "secured": secured,
    "long-cut": long_cut,
    "return": returns,
    "head": head,
    "home": home,
}


@contextmanager
def _timed(name: str) -> Iterator[None]:
    began = monotonic()
    print(f"{name}: ", end="", flush=True)
    yield
    print(f" ({monotonic() - began:.0f} s)", flush=True)


def main(
    only: Annotated[str, typer.Option(metavar="NAME,...", help="Some of the scenarios.")] = ",".join(SCENARIOS),
    transport: Annotated[str, typer.Option(metavar="NAME", help="Of KV: nixl, or nccl, which is Gloo here.")] = "nixl",
) -> None:
    """See the module."""
    if reason := forbidden():
        raise Unavailable(reason)
    (kind,) = names(transport, ACROSS)
    settings = SETTINGS | {"TANDEM_TRANSPORT": kind}
    failed: list[Any] = []
    for name in names(only, SCENARIOS):
        with _timed(name):
            try:
                print(SCENARIOS[name](settings), end="")
            except (Failure, TandemError) as error:
                failed.append(name)
                print(f"FAILED: {error}", end="")
    sys.exit(1 if failed else 0)
