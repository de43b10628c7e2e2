"""Cost of a grammar in a decode step: masks filled during the forward, masks filled before it, and no masks.

Three engines with one model step in turn. The vocabulary consists of random words; each row is inside a JSON string.
"""

from __future__ import annotations

import json
import random
import string
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import typer

from engine.core.engine_config import EngineConfig
from engine.core.sequence import Sequence
from engine.decoding.structured_output import Filling, Masks, Vocabulary, apply, compile_spec
from engine.engine import Engine
from engine.loading.model_loader import load_model
from engine.runner.model_runner import ModelRunner
from loadtest.harness.options import Repeats
from loadtest.harness.random_checkpoints import make_checkpoint
from loadtest.harness.stats import Spread, in_turn, ratios, taken
from tandem.sampling import GrammarSpec, Sampling

GRAMMARS = {
    "JSON schema, in a string": (GrammarSpec("json_schema", json.dumps({"type": "string"})), b'"'),
    "JSON schema, string of limited length": (
        GrammarSpec("json_schema", json.dumps({"type": "string", "minLength": 900, "maxLength": 1000})),
        b'"',
    ),
    "regex [a-z ]+": (GrammarSpec("regex", "[a-z ]+[.]"), b"a"),
}
PROMPT = 64


class Before(Masks):
    """Fills the masks before the forward, not while it runs."""

    def begin(self, sequences: list[Sequence], vocab_size: int) -> Filling | None:
        filling = super().begin(sequences, vocab_size)
        return filling.wait() if filling else None


class Watched(Masks):
    """Measures how long steps wait for their masks: the time that the forward does not hide."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    def begin(self, sequences: list[Sequence], vocab_size: int) -> Filling | None:
        filling = super().begin(sequences, vocab_size)
        if filling is not None:
            wait = filling.wait

            def watched() -> Filling:
                self.waited.append(taken(wait))
                return filling

            filling.wait = watched  # type: ignore[method-assign]
        return filling


def vocabulary(size: int) -> Vocabulary:
    generator = random.Random(0)
    letters = string.ascii_lowercase * 4 + " " * 20 + string.ascii_uppercase + string.digits + "{}[]:,-_"
    texts = [bytes([byte]) for byte in range(256)]
    known = set(texts)
    while len(texts) < size - 1:
        word = "".join(generator.choices(letters, k=generator.randint(2, 9))).encode()
        if word not in known:
            known.add(word)
            texts.append(word)
    return Vocabulary.of(texts, size, size - 1)


def engine_of(model: ModelRunner, batch: int, repeats: int, masks: Masks, grammar: tuple[GrammarSpec, bytes] | None,
              words: Vocabulary) -> Engine:  # fmt: skip
    max_len = PROMPT + repeats + 16
    engine = Engine(
        model, EngineConfig(num_blocks=batch * (max_len // 16 + 2), block_size=16, token_budget=1024, max_running=batch)
    )
    engine.masks = masks
    compiled = compile_spec(grammar[0], words) if grammar else None
    for index in range(batch):
        tokens = [random.randrange(1000, model.vocab_size - 1) for _ in range(PROMPT)] + list(
            grammar[1] if grammar else b'"'
        )
        how = Sampling(temperature=1.0, seed=index, grammar=grammar[0] if grammar else None)
        engine.add(
            Sequence(
                id=f"{index}",
                tokens=tokens,
                prompt_len=PROMPT,
                max_len=max_len,
                stop_ids=frozenset([model.vocab_size - 1]),
                sampling=how,
                grammar=compiled,
            )
        )
    for _ in range(3):
        engine.step()
    return engine


def main(
    vocab: Annotated[int, typer.Option(metavar="N", help="Tokens of the vocabulary.")] = 128256,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences.")] = 8,
    repeats: Repeats = 15,
    shape: Annotated[str, typer.Option(metavar="SHAPE", help="Of the model.")] = "SmolLM2-135M",
) -> None:
    torch.set_num_threads(1)
    words = vocabulary(vocab)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder, shape, vocab_size=vocab)
        model = load_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"), max_model_len=512)
        print(f"{shape}, vocabulary {vocab}, bfloat16, batch {batch}, sampled, one thread")
        for name, grammar in GRAMMARS.items():
            watched, masks = Watched(), Masks()
            engines = {
                "none": engine_of(model, batch, repeats, Masks(), None, words),
                "while": engine_of(model, batch, repeats, watched, grammar, words),
                "before": engine_of(model, batch, repeats, Before(), grammar, words),
            }
            sides = {**steps(engines), **alone(masks, engines["while"], vocab)}
            show(name, engines, watched, in_turn(sides, repeats), repeats)
            for each in (masks, *(engine.masks for engine in engines.values())):
                each.end()


def steps(engines: dict[str, Engine]) -> dict[str, Callable[[], float]]:
    return {side: partial(taken, engine.step) for side, engine in engines.items()}


def alone(masks: Masks, engine: Engine, vocab: int) -> dict[str, Callable[[], float]]:
    """Seconds of filling the masks of the engine's sequences, and of applying them, without a forward."""
    rows, logits = list(engine.sequences.values()), torch.zeros(len(engine.sequences), vocab)

    def fill() -> Filling:
        filling = masks.begin(rows, vocab)
        assert filling is not None
        filling.wait()
        return filling

    filled = fill()
    return {"fill": lambda: taken(fill), "apply": lambda: taken(lambda: apply(logits, filled))}


def show(
    name: str, engines: dict[str, Engine], watched: Watched, side_seconds: dict[str, list[float]], repeats: int
) -> None:
    print(f"{name}: {min(len(engine.sequences) for engine in engines.values())} rows to the end")
    for side, seconds in side_seconds.items():
        spread = Spread.of(seconds)
        print(f"  {side:7} least {min(seconds) * 1e3:8.3f} ms, median {spread.median * 1e3:8.3f} ms")
    spread = Spread.of(watched.waited[-repeats:])
    print(f"  not hidden: median {spread.median * 1e3:.3f} ms, middle half up to {spread.high * 1e3:.3f} ms")
    for side in ("while", "before"):
        print(f"  {side} / none: {ratios(side_seconds[side], side_seconds['none']).median:.3f}")
