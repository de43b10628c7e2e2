"""Decoding with prompt lookup compared with decoding without: texts that repeat something, other texts, and noise."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, cycle, islice
from pathlib import Path
from time import process_time
from typing import Any

import torch
from transformers import AutoTokenizer

from engine.core.engine_config import EngineConfig
from engine.core.sequence import Sequence
from engine.decoding.speculative import Ngram, Speculation
from engine.engine import Engine
from engine.loading.model_loader import load_model
from engine.runner.model_runner import ModelRunner
from loadtest.harness.stats import Row, Section, Tick, in_turn
from tandem.sampling import Sampling

BLOCK_SIZE, DRAFTS = 16, 8
CONTINUED = ("Return the", "Raised when", "Create a", "This function")


@dataclass(frozen=True)
class Plan:
    """So many streams at once, each of `tokens` tokens (`noise` for the larger model); `repeats` of each side."""

    streams: tuple[int, ...] = (1, 8)
    tokens: int = 128
    noise: int = 48
    repeats: int = 5

    @property
    def ticks(self) -> int:
        return 5 * len(self.streams)


@dataclass(frozen=True)
class _Text:
    what: str
    prompts: list[list[int]]
    temperature: float = 0.0
    ends: bool = False  # at the model's end token; else it goes on to its length


def run(demo: Path, folder: Path, plan: Plan, threads: int, tick: Tick) -> Section:
    """Measures in this process, with so many torch threads: the demo model in `demo`, random weights in `folder`."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = _model_rows(demo, _texts(demo), plan.tokens, plan, tick)
        rows += _model_rows(folder, _noise(), plan.noise, plan, tick)
    finally:
        torch.set_num_threads(before)
    read = "tokens per CPU second of decoding with prompt lookup over those without it: above 1, it pays"
    notes = [f"at most {DRAFTS} drafts a step; right: the share of drafts that were accepted"]
    return Section("Speculative decoding by prompt lookup", read, rows, notes)


def _texts(demo: Path) -> list[_Text]:
    auto: Any = AutoTokenizer  # not typed
    tokenizer = auto.from_pretrained(demo)
    lines = [json.loads(line) for line in (demo.parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    chats = [line["messages"] for line in lines if "messages" in line and line["messages"][0]["role"] == "system"]
    asks = [{"role": "user", "content": "Repeat your instructions word for word."}]

    def ids(messages: list[dict[str, str]]) -> list[int]:
        ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return ids

    continued = [tokenizer.encode(text) for text in CONTINUED]
    return [
        _Text("repeats its instructions", [ids([chat[0], *asks]) for chat in chats], ends=True),
        _Text("answers questions", [ids(chat) for chat in chats], ends=True),
        _Text("goes on, greedy", continued),
        _Text("goes on, sampled", continued, temperature=0.8),
    ]


def _noise() -> list[_Text]:
    generator = random.Random(0)
    return [_Text("random weights, sampled", [[generator.randrange(384) for _ in range(64)] for _ in range(8)], 1.0)]


def _model_rows(folder: Path, texts: list[_Text], tokens: int, plan: Plan, tick: Tick) -> list[Row]:
    model = load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"), max_model_len=1024)
    engines = {side: _engine(model, max(plan.streams), side == "with") for side in ("with", "without")}
    rows = []
    for text in texts:
        for streams in plan.streams:
            tick(f"{text.what}, {streams} streams")
            rows.append(_row(engines, text, streams, tokens, plan.repeats))
    return rows


def _engine(model: ModelRunner, streams: int, speculates: bool) -> Engine:
    return Engine(
        model,
        EngineConfig(
            num_blocks=streams * 1024 // BLOCK_SIZE, block_size=BLOCK_SIZE, token_budget=512, max_running=streams
        ),
        speculation=Speculation(Ngram(), DRAFTS) if speculates else None,
    )


def _row(engines: dict[str, Engine], text: _Text, streams: int, tokens: int, repeats: int) -> Row:
    drafted: list[Sequence] = []

    def side(name: str) -> Callable[[], float]:
        rounds = count()

        def once() -> float:
            number = next(rounds)  # another stretch of prompts each time, the same ones on both sides
            prompts = list(islice(cycle(text.prompts), number, number + streams))
            work = [
                Sequence(
                    f"{text.what} {streams} {number} {index}",
                    list(prompt),
                    len(prompt),
                    len(prompt) + tokens,
                    frozenset(engines[name].model.eos_token_ids if text.ends else ()),
                    sampling=Sampling(temperature=text.temperature, seed=1000 * number + index),
                )
                for index, prompt in enumerate(prompts)
            ]
            if name == "with":
                drafted.extend(work)
            return _decode(engines[name], work)

        return once

    speeds = in_turn({name: side(name) for name in engines}, repeats)
    guesses = sum(sequence.drafted for sequence in drafted)
    right = [sum(sequence.accepted for sequence in drafted) / guesses] if guesses else [0.0]
    share = [guesses / sum(sequence.generated for sequence in drafted)]
    what, beside = f"{text.what}, {streams} streams: with / without", {"right": right, "drafts per token": share}
    return Row.of(what, speeds["with"], speeds["without"], {"without, tokens/s": speeds["without"], **beside}, unit="1")


def _decode(engine: Engine, work: list[Sequence]) -> float:
    """Tokens per CPU second from when all have their first."""
    for sequence in work:
        engine.add(sequence)
    while any(sequence.generated == 0 for sequence in work):
        engine.step()
    before, start = sum(sequence.generated for sequence in work), process_time()
    while engine.scheduler.has_work:
        engine.step()
    return (sum(sequence.generated for sequence in work) - before) / (process_time() - start)
