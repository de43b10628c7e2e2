"""Engines without servers, each in its own process and environment, pinned, measured in turn (engine_forward.py)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from cluster.exit_with_parent import bound_to_parent
from loadtest.comparison.peer_servers import Peers
from loadtest.harness.stats import Row, Section, Spread, Tick, ratios
from tandem.errors import Unavailable

SHAPES = ("SmolLM2-135M", "Qwen3-0.6B")
VOCAB = 49152  # token ids that each of them has
ROOT = Path(__file__).parents[2]
FORWARD = Path(__file__).with_name("engine_forward.py")
OURS = ("tandem", "transformers", "floor")  # run in our own environment
ENGINES = (*OURS, "vllm", "llama", "openvino")
WITHIN = 1.25  # of the best peer, promised


@dataclass(frozen=True)
class Plan:
    """`rounds` of each engine in turn: a prompt of `prompt` tokens, then `steps` steps of each of `batches` sequences
    of `context` tokens; with each shape and each number of `threads`."""

    engines: tuple[str, ...] = ENGINES
    shapes: tuple[str, ...] = SHAPES[:1]
    threads: tuple[int, ...] = (1, 2)
    batches: tuple[int, ...] = (1, 8)
    prompt: int = 512
    context: int = 128
    steps: int = 16
    rounds: int = 7

    @property
    def ticks(self) -> int:
        return len(self.shapes) * len(self.threads) * (len(self.engines) + self.rounds + 1)


class Engine:
    """One engine's process, stopped while it is not measured, because threads of some engines spin. Ends with this
    one."""

    def __init__(self, name: str, peers: Peers, checkpoint: Path, threads: int, log: Path) -> None:
        """Returns when it has loaded. Raises SettingsError without its environment, Unavailable when it fails."""
        self.name = name
        self._log = log
        python = sys.executable if name in OURS else str(peers.executable(name, "python"))
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        if name in OURS:
            env["PYTHONPATH"] = str(ROOT)
        cores = sorted(os.sched_getaffinity(0))[:threads]
        with log.open("w") as noise:
            self._process = subprocess.Popen(
                bound_to_parent([python, "-P", str(FORWARD), name, str(checkpoint), str(threads)], cores),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=noise,
                env=env | {"OMP_NUM_THREADS": str(threads)},
                cwd=log.parent,
                text=True,
                start_new_session=True,
            )
        try:
            if self._line() != "ready":
                raise Unavailable(f"{name} did not start: {self._last_words()}")
            self._process.send_signal(signal.SIGSTOP)
        except BaseException:
            self.stop()
            raise

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        seconds, token = self._ask({"prefill": prompt})
        return seconds, token

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        seconds: list[float] = self._ask({"decode": prompts, "steps": steps})
        return seconds

    def stop(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _ask(self, question: dict[str, object]) -> list:
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer: list = json.loads(self._line())
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"{self.name} ended: {self._last_words()}")
        return line.strip()

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace")[-1500:]


def run(peers: Peers, plan: Plan, tick: Tick) -> list[Section]:
    """A section for each shape and number of threads. Raises SettingsError, Unavailable."""
    return [_with_threads(peers, plan, shape, threads, tick) for shape in plan.shapes for threads in plan.threads]


def _with_threads(peers: Peers, plan: Plan, shape: str, threads: int, tick: Tick) -> Section:
    timings: dict[str, dict[str, list[float]]] = {}  # what -> engine -> seconds in each round
    tokens: dict[str, list[int]] = {name: [] for name in plan.engines}
    checkpoint = peers.checkpoint(shape)
    with _engines(peers, plan, checkpoint, threads, tick) as engines:
        for number in range(plan.rounds + 1):
            tick(f"{shape}, {threads} threads: {f'round {number}' if number else 'warm-up'}")
            prompt = random.choices(range(VOCAB), k=plan.prompt)
            contexts = {
                batch: [random.choices(range(VOCAB), k=plan.context) for _ in range(batch)] for batch in plan.batches
            }
            for engine in engines[:: 1 if number % 2 else -1]:
                seconds, token = engine.prefill(prompt)
                tokens[engine.name].append(token)
                once = {f"prefill {plan.prompt}": seconds}
                for batch in plan.batches:
                    once[f"decode, batch {batch}"] = median(engine.decode(contexts[batch], plan.steps))
                for what, value in once.items() if number else ():
                    timings.setdefault(what, {}).setdefault(engine.name, []).append(value)
    notes = [
        f"bfloat16, {shape}, {threads} thread{'s' if threads > 1 else ''}; decode from {plan.context} tokens on, the"
        f" median of {plan.steps} steps; {plan.rounds} rounds in turn after one that warms up",
        "floor: weights and KV at the bandwidth of reading 256 MiB; products at the rate of one of 512x2048x2048, ours"
        " or torch's, whichever is faster",
        *_same_model(tokens),
    ]
    read = "tandem / peer: below 1, Tandem is faster. floor / tandem: the share of the floor"
    rows = [row for what, sides in timings.items() for row in compare(what, sides)]
    title = f"Engines, {shape}, {threads} thread{'s' if threads > 1 else ''}"
    return Section(title, read, rows, notes, dict(timings))


def compare(what: str, sides: dict[str, list[float]]) -> list[Row]:
    """Tandem against each peer, with the best peer named, and against the floor. Nothing without Tandem."""
    ours = sides.get("tandem")
    peers = {name: seconds for name, seconds in sides.items() if name not in ("tandem", "floor")}
    if ours is None:
        return []
    best = min(peers, key=lambda name: median(peers[name]), default=None)
    rows = []
    for name, seconds in peers.items():
        ratio, mark = ratios(ours, seconds), ""
        if name == best:
            mark = f" (best peer; ≤ {WITHIN:g}: {'kept' if ratio.median <= WITHIN else 'NOT KEPT'})"
        beside = {"tandem": (Spread.of(ours), "s"), name: (Spread.of(seconds), "s")}
        rows.append(Row(f"{what}: tandem / {name}{mark}", ratio, beside))
    if floor := sides.get("floor"):
        rows.append(Row(f"{what}: floor / tandem", ratios(floor, ours), {"floor": (Spread.of(floor), "s")}))
    return rows


def _same_model(tokens: dict[str, list[int]]) -> Iterator[str]:
    """Whether an engine computes the same function: with random weights in bfloat16 close decisions differ, but
    unrelated functions would never agree."""
    ours = tokens.get("tandem", [])
    for name, theirs in tokens.items():
        if ours and name not in ("tandem", "floor"):
            same = sum(a == b for a, b in zip(ours, theirs, strict=True))
            yield f"{name}: the same first token in {same} of {len(ours)} prompts{'' if same else ': ANOTHER MODEL'}"


@contextmanager
def _engines(peers: Peers, plan: Plan, checkpoint: Path, threads: int, tick: Tick) -> Iterator[Sequence[Engine]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-peers-")))
        engines = []
        for name in plan.engines:
            tick(f"{threads} threads: loading {name}")
            engines.append(Engine(name, peers, checkpoint, threads, folder / f"{name}.log"))
            stack.callback(engines[-1].stop)
        yield engines
