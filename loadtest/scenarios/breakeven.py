"""Whether the router chooses the prefill path that is faster for all requests.

One prefill and one decode worker, and three routers over both: the first always prefills on the prefill worker
(`local_prefill` never), the second never does (always), and the third chooses by its own measurements. Fresh prompts of
16 to 2,048 tokens go to each in turn, on an idle cluster and during running streams. The cost of a path is the time to
first token and the harm to the streams: the seconds by which all their tokens together came later than usual, from the
prompt's sending until its second token.

Where the medians of the two paths differ by more than a tenth of the slower one, the third router should have chosen
the faster path.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.harness.options import Json, Repeats, Shape
from loadtest.harness.processes import Local, precedence
from loadtest.harness.random_checkpoints import make_checkpoint
from loadtest.harness.stats import percentile
from loadtest.scenarios.ttft import Gap, ask, streams, within
from tandem.async_client import AsyncClient

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
STREAMS = (0, 2, 8)
ROUTERS = {"there": "never", "here": "always", "chosen": "measured"}
CLEAR = 0.1
SETTLE_S = 0.3


@dataclass(frozen=True)
class Sample:
    """One prompt: seconds to its first token, seconds that streams lost, and which path it took."""

    ttft: float
    harm: float
    local: bool

    @property
    def cost(self) -> float:
        return self.ttft + self.harm


@dataclass(frozen=True)
class Case:
    """One length with a number of concurrent streams, by router."""

    tokens: int
    streams: int
    samples: dict[str, list[Sample]]

    def cost(self, router: str) -> float:
        return percentile([sampled.cost for sampled in self.samples[router]], 0.5)

    @property
    def clear(self) -> bool:
        costs = self.cost("here"), self.cost("there")
        return max(costs) - min(costs) > CLEAR * max(costs)

    @property
    def right(self) -> int:
        """How many of the third router's choices were the faster path."""
        here = self.cost("here") < self.cost("there")
        return sum(sampled.local == here for sampled in self.samples["chosen"])


async def sample(client: AsyncClient, vocab: int, tokens: int, gaps: list[Gap], usual_s: float) -> Sample:
    asked = await ask(client, vocab, tokens)
    await asyncio.sleep(SETTLE_S)  # the gap that the second token lies in has ended by then
    late = sum(gap - usual_s for gap in within(gaps, asked.during))
    return Sample(asked.ttft, late, asked.receipt.path == "local")


async def measure(local: Local, vocab: int, repeats: int) -> list[Case]:
    clients = {name: AsyncClient(local.address(name)) for name in ROUTERS}
    cases = []
    try:
        for count in STREAMS:
            samples: dict[int, dict[str, list[Sample]]] = {n: {name: [] for name in ROUTERS} for n in LENGTHS}
            for number in range(repeats + 1):  # the first one teaches the routers
                print(f"  {count} streams, round {number} of {repeats}", flush=True)
                async with streams(clients["there"], vocab, count, 1800) as gaps:
                    began = len(gaps)
                    await asyncio.sleep(2.0)
                    usual_s = percentile([end - start for start, end in gaps[began:]], 0.5) if count else 0.0
                    for tokens in LENGTHS:
                        for name in list(ROUTERS)[:: 1 if number % 2 else -1]:
                            sampled = await sample(clients[name], vocab, tokens, gaps, usual_s)
                            if number:
                                samples[tokens][name].append(sampled)
            cases += [Case(tokens, count, samples[tokens]) for tokens in LENGTHS]
    finally:
        for client in clients.values():
            await client.close()
    return cases


def show(cases: list[Case]) -> None:
    print("\n prompt  streams   here: TTFT, harm     there: TTFT, harm    faster   chosen: local")
    for case in cases:
        parts = []
        for name in ("here", "there"):
            middle = [
                percentile([getattr(sampled, what) for sampled in case.samples[name]], 0.5) for what in ("ttft", "harm")
            ]
            parts.append(f"{middle[0]:6.3f} s {middle[1]:6.2f} s")
        faster = ("here" if case.cost("here") < case.cost("there") else "there") if case.clear else "equal"
        chosen = case.samples["chosen"]
        print(
            f"{case.tokens:7} {case.streams:8}   {parts[0]:20} {parts[1]:20} {faster:8} "
            f"{sum(sampled.local for sampled in chosen)} of {len(chosen)}"
        )
    clear = [case for case in cases if case.clear]
    right, asked = sum(case.right for case in clear), sum(len(case.samples["chosen"]) for case in clear)
    print(f"the faster path in {right} of {asked} choices in {len(clear)} clear cases of {len(cases)} (wanted: 90 %)")


def main(repeats: Repeats = 5, shape: Shape = "SmolLM2-135M", results: Json = None) -> None:
    with tempfile.TemporaryDirectory(prefix="tandem-breakeven-", dir=Path.home()) as folder:  # /tmp may be in memory
        model = make_checkpoint(Path(folder) / "model", shape)
        vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        with Local(model=model, dtype="bfloat16", kv_blocks=2000) as local:
            for name, choice in ROUTERS.items():
                local.launch("router", name, local_prefill=choice)
            local.launch("prefill", "prefill-0", core=0)
            local.launch("decode", "decode-0", core=1)
            for name in ROUTERS:
                local.wait_seen(name, 2, timeout_s=240.0)
            with precedence():
                cases = asyncio.run(measure(local, vocab, repeats))
    show(cases)
    if results:
        results.write_text(json.dumps([asdict(case) for case in cases]))
