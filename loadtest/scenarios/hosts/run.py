"""A cluster on three hosts of this machine (namespaces) while their network and one of them fail.

    loss         1 % of the frames of host b are lost
    delay        5 ms each way to host b, 10 ms for a round trip
    slow         1 Gbit/s to host b, prompts of 8,000 tokens
    long-cut     both hosts with workers are cut off for 25 s
    return       host b is killed, and joins again by the command of docs/ray.md
    head         the host of Ray's head is lost, with `tandem up` and the router on host a
    home         the host of `tandem up` is lost: Ray ends the workers on the others

Each shows whether the tokens are those of an undisturbed run, the longest silence of a stream, and whether the ledgers
balance afterwards. Needs root.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Annotated, Any

import typer

from loadtest.harness.options import names
from loadtest.scenarios.hosts.namespaces import forbidden
from loadtest.scenarios.hosts.ray_hosts import ROOT, RayHosts, Stream
from tandem.errors import TandemError, Unavailable

MODEL = "demo/model"
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
HEADLESS_S = 90.0  # longer than a raylet waits for the head by default
POOL = {"prefill-0", "decode-0", "decode-1"}


class Failure(Exception):
    """A promise that was not kept."""


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(f"{count} {length} {seed}")
    return [[draw.randrange(5, 600) for _ in range(length + index)] for index in range(count)]


def begin(cluster: RayHosts, asked: list[list[int]], new: int) -> list[Stream]:
    options = {"max_tokens": new, "ignore_eos": True, "temperature": 0.0, "timeout": END_S}
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
    """Streams after `harm`: new prompts, so that KV moves, and the first ones, whose tokens are known. Raises Failure
    if these differ from those before."""
    expected = finished(cluster, begin(cluster, prompts(count, length), new))
    harm()
    found: list[Stream] = []
    for seed in range(rounds):
        found += (streams := begin(cluster, prompts(count, length, seed), new))
        tokens = finished(cluster, streams)
        if seed == 0 and tokens != expected:
            raise Failure("the tokens differ from those before")
    settle(cluster)
    return found


def wired(options: str) -> str:
    with RayHosts(MODEL, SETTINGS, {"b": "delay 0"}) as cluster:
        return _report(through(cluster, lambda: cluster.hosts["b"].wire(options), 4, length=200, count=8, new=300))


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


def slow() -> str:
    with _long_model() as model, RayHosts(model, SETTINGS | {"TANDEM_KV_BLOCKS": "4096"}) as cluster:
        found = through(cluster, lambda: cluster.hosts["b"].limit("1gbit"), 3, length=LONG_PROMPT, count=4, new=40)
        moved = [stream.receipt["transfer"]["bytes"] for stream in found if stream.receipt.get("transfer")]
        return f"{_report(found)}; {sum(moved) / 2**20:.0f} MiB of KV in {len(moved)} transfers, 4 at once"


def long_cut() -> str:
    with RayHosts(MODEL, SETTINGS) as cluster:

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


def returns() -> str:
    with RayHosts(MODEL, SETTINGS) as cluster:
        streams = under(cluster, prompts(6, 30), 1000, cluster.hosts["b"].kill)
        began = monotonic()
        cluster.hosts["b"].boot()
        cluster.ray_start("b")
        settle(cluster)
        took = monotonic() - began
        finished(cluster, begin(cluster, prompts(6, 30, 1), 50))
        return f"{_report(streams)}; its worker served again {took:.1f} s after its host had started"


def head() -> str:
    with RayHosts(MODEL, SETTINGS | PATIENT, up_on="a") as cluster:
        streams = under(cluster, prompts(6, 30), 2000, cluster.hosts["head"].kill)
        lost, answered = monotonic(), 0
        while monotonic() < lost + HEADLESS_S:
            finished(cluster, begin(cluster, prompts(6, 30, answered), 50))
            answered += 6
        settle(cluster)
        return f"{_report(streams)}; {answered} more requests were answered in {HEADLESS_S:.0f} s without a head"


def home() -> str:
    with RayHosts(MODEL, SETTINGS | {"TANDEM_DRAIN_GRACE_S": "5"}, up_on="a") as cluster:
        began = monotonic()
        cluster.hosts["a"].kill()
        while "WorkerActor" in cluster.hosts["b"].do("ps", "-eo", "args"):
            if monotonic() > began + END_S:
                raise Failure("workers are left on host b")
            sleep(0.5)
        return f"no worker is left on host b after {monotonic() - began:.1f} s"


SCENARIOS: dict[str, Callable[[], str]] = {
    "loss": partial(wired, "loss 0.01"),
    "delay": partial(wired, "delay 5"),
    "slow": slow,
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
) -> None:
    """See the module."""
    if reason := forbidden():
        raise Unavailable(reason)
    failed: list[Any] = []
    for name in names(only, SCENARIOS):
        with _timed(name):
            try:
                print(SCENARIOS[name](), end="")
            except (Failure, TandemError) as error:
                failed.append(name)
                print(f"FAILED: {error}", end="")
    sys.exit(1 if failed else 0)
