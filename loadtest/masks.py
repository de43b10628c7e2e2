"""What a grammar adds to a decode step: masks filled while the forward runs, filled before it, and none at all.

    python -m loadtest.masks [--vocab 128256] [--batch 8] [--repeats 15] [--shape SmolLM2-135M]

Three engines over one model step in turn. The vocabulary is made of random words, each row is inside a JSON string.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import tempfile

import torch

from engine.checkpoints import make_checkpoint
from engine.engine import Engine
from engine.grammar import Filling, Masks, Vocabulary, _compiled, apply
from engine.model import Model
from engine.sequence import GrammarSpec, Sampling, Sequence
from loadtest.stats import Spread, in_turn, ratios, taken

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
    """Knows how long the step had to wait for its masks: what the forward did not hide."""

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


def engine_of(model: Model, batch: int, repeats: int, masks: Masks, grammar: tuple[GrammarSpec, bytes] | None,
              words: Vocabulary) -> Engine:  # fmt: skip
    limit = PROMPT + repeats + 16
    engine = Engine(model, num_blocks=batch * (limit // 16 + 2), block_size=16, token_budget=1024, max_running=batch)
    engine.masks = masks
    compiled = _compiled(grammar[0], words) if grammar else None
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
                limit=limit,
                stop_ids=frozenset([model.vocab_size - 1]),
                sampling=how,
                grammar=compiled,
            )
        )
    for _ in range(3):
        engine.step()
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--shape", default="SmolLM2-135M")
    given = parser.parse_args()
    torch.set_num_threads(1)
    words = vocabulary(given.vocab)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder, given.shape, vocab_size=given.vocab)
        model = Model.load(folder, dtype=torch.bfloat16, device=torch.device("cpu"), max_model_len=512)
        print(f"{given.shape}, vocabulary {given.vocab}, bfloat16, batch {given.batch}, sampled, one thread")
        for name, grammar in GRAMMARS.items():
            watched = Watched()
            engines = {
                "none": engine_of(model, given.batch, given.repeats, Masks(), None, words),
                "while": engine_of(model, given.batch, given.repeats, watched, grammar, words),
                "before": engine_of(model, given.batch, given.repeats, Before(), grammar, words),
            }
            alone = list(engines["while"].sequences.values())
            masks, logits = Masks(), torch.zeros(len(alone), given.vocab)
            filled = masks.begin(alone, given.vocab)
            assert filled is not None

            def fill(masks: Masks = masks, rows: list[Sequence] = alone) -> float:
                def once() -> None:
                    filling = masks.begin(rows, given.vocab)
                    assert filling is not None
                    filling.wait()

                return taken(once)

            def put(filled: Filling = filled, logits: torch.Tensor = logits) -> float:
                return taken(lambda: apply(logits, filled))

            sides = {side: (lambda engine=engine: taken(engine.step)) for side, engine in engines.items()}
            found = in_turn({**sides, "fill": fill, "apply": put}, given.repeats)
            print(f"{name}: {min(len(engine.sequences) for engine in engines.values())} rows to the end")
            for side, seconds in found.items():
                spread = Spread.of(seconds)
                print(f"  {side:7} least {min(seconds) * 1e3:8.3f} ms, median {spread.median * 1e3:8.3f} ms")
            spread = Spread.of(watched.waited[-given.repeats :])
            print(f"  not hidden: median {spread.median * 1e3:.3f} ms, middle half up to {spread.high * 1e3:.3f} ms")
            for side in ("while", "before"):
                print(f"  {side} / none: {ratios(found[side], found['none']).median:.3f}")
            for engine in engines.values():
                engine.masks.end()
            masks.end()


if __name__ == "__main__":
    main()
