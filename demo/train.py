"""Train the demo model: `python demo/train.py [--minutes 20] [--out demo/model] [--seed 0]`.

A Qwen3-shaped decoder of 1.7 million parameters learns the docstrings of the standard library of the
Python that runs this script, on one CPU thread. What it reads is in corpus.py.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from corpus import MIXES, Example, Writer, read_standard_library
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END, PAD = "<|end|>", "<|pad|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
VOCABULARY = 2048
LONGEST_CONTEXT = 4096
SHAPES = (*[(6, 256)] * 5, (1, 1280))  # rows and tokens of a batch, in turn
WARM_UP = 0.02  # of the run
SHOW_EVERY, SAVE_EVERY = 15.0, 120.0  # seconds
KINDS = ("text", "answer", "copy")
NOTHING = -100  # a target that is not learned


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    library = read_standard_library()
    writer = Writer(library, options.seed, options.mix)
    print(f"{len(library)} docstrings, {sum(len(e.doc) for e in library):,} characters, {writer.counts()}")
    if options.resume:
        tokenizer = Tokenizer.from_file(str(options.out / "tokenizer.json"))
        model = Qwen3ForCausalLM.from_pretrained(options.out, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer([e.doc for e in library] + [f"What does {e.name} do?" for e in library])
        model = Qwen3ForCausalLM(model_config(tokenizer))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    run = Run(options.minutes * 60, options.steps)
    train(model, batches(writer, tokenizer), run, lambda: save(model, tokenizer, options.out))
    print(f"{run.elapsed / 60:.1f} min  {run.line()}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20, help="how long to train")
    parser.add_argument("--steps", type=int, help="train this many steps instead, however long it takes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mix", choices=MIXES, default="answers", help="which examples are written most")
    parser.add_argument("--resume", action="store_true", help="train the model in --out on (use another seed)")
    return parser.parse_args()


# -- tokenizer and model ---------------------------------------------------------------------------------


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, PAD, *ROLES.values()],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def model_config(tokenizer: Tokenizer) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=160,
        intermediate_size=352,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LONGEST_CONTEXT,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the whole checkpoint beside `out`, then move it in file by file: a reader never sees half a file."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        copy = Qwen3ForCausalLM(model.config)
        copy.load_state_dict(model.state_dict())
        copy.generation_config = GenerationConfig(
            eos_token_id=tokenizer.token_to_id(END), pad_token_id=tokenizer.token_to_id(PAD)
        )
        copy.to(torch.bfloat16).save_pretrained(folder)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=END,
            pad_token=PAD,
            additional_special_tokens=list(ROLES.values()),
            chat_template=CHAT_TEMPLATE,
            model_max_length=LONGEST_CONTEXT,
            clean_up_tokenization_spaces=False,
        ).save_pretrained(folder)
        for file in sorted(Path(folder).iterdir()):
            shutil.move(file, out / file.name)


# -- batches ---------------------------------------------------------------------------------------------


@dataclass
class Row:
    """Tokens; which example each is of; and what it teaches (an index in KINDS, or NOTHING)."""

    tokens: list[int] = field(default_factory=list)
    examples: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    def add(self, tokens: list[int], example: int, kind: int) -> None:
        self.tokens += tokens
        self.examples += [example] * len(tokens)
        self.kinds += [kind] * len(tokens)


@dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor  # [rows, length]
    examples: torch.Tensor  # [rows, length]
    kinds: torch.Tensor  # [rows, length]

    def mask(self) -> torch.Tensor:
        """[rows, 1, length, length]: a token sees the earlier tokens of its own example."""
        length = self.tokens.shape[1]
        same = self.examples[:, None, :, None] == self.examples[:, None, None, :]
        return same & torch.ones(length, length, dtype=torch.bool).tril()


def batches(writer: Writer, tokenizer: Tokenizer) -> Iterator[Batch]:
    while True:
        for rows, length in SHAPES:
            filled = [fill_row(writer, tokenizer, length) for _ in range(rows)]
            columns = [[getattr(row, f.name)[:length] for row in filled] for f in fields(Row)]
            yield Batch(*map(torch.tensor, columns))


def fill_row(writer: Writer, tokenizer: Tokenizer, length: int) -> Row:
    """Examples, one after the other, that do not see each other; the last one is cut off."""
    row = Row()
    number = 0
    while len(row.tokens) < length:
        add_example(row, number, writer.example(length), tokenizer)
        number += 1
    return row


def add_example(row: Row, number: int, example: Example, tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id(END)
    for role, text, teaches in example:
        if role is not None:
            row.add([tokenizer.token_to_id(ROLES[role])], number, NOTHING)
        kind = KINDS.index(teaches) if teaches else NOTHING
        row.add([*tokenizer.encode(text).ids, end], number, kind)


# -- training --------------------------------------------------------------------------------------------


class Run:
    """How far the training is, and how well it goes."""

    def __init__(self, seconds: float, steps: int | None) -> None:
        self.seconds, self.steps = seconds, steps
        self.began = time.monotonic()
        self.step = 0
        self.losses: dict[str, float] = defaultdict(lambda: math.log(VOCABULARY))

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def progress(self) -> float:
        done = self.step / self.steps if self.steps else self.elapsed / self.seconds
        return min(1.0, done)

    def rate(self) -> float:
        """The learning rate as a share of its peak: a short rise, then half a cosine."""
        if self.progress < WARM_UP:
            return (self.progress + 1e-3) / WARM_UP
        return 0.01 + 0.99 * (1 + math.cos(math.pi * self.progress)) / 2

    def note(self, kind: str, loss: float) -> None:
        self.losses[kind] += 0.02 * (loss - self.losses[kind])

    def line(self) -> str:
        losses = "  ".join(f"{kind} {self.losses[kind]:.3f}" for kind in KINDS)
        left = self.elapsed * (1 / max(self.progress, 1e-6) - 1)
        return f"step {self.step}  {left / 60:.1f} min left  loss: {losses}"


def train(model: Qwen3ForCausalLM, lessons: Iterator[Batch], run: Run, save_now: Callable[[], None]) -> None:
    optimizers = optimizers_of(model)
    shown = saved = 0.0
    while run.progress < 1:
        learn(model, next(lessons), run).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            update(optimizer, run.rate())
        run.step += 1
        if run.elapsed > shown + SHOW_EVERY:
            shown = run.elapsed
            print(run.line(), flush=True)
        if run.elapsed > saved + SAVE_EVERY:
            saved = run.elapsed
            save_now()
    save_now()


def update(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * rate
    optimizer.step()
    optimizer.zero_grad()


def optimizers_of(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms.

    AdamW alone learned less: after two minutes side by side, a loss of 5.7 on plain text against 5.0.
    """
    inner = [p for p in model.model.layers.parameters() if p.dim() == 2]
    chosen = {id(p) for p in inner}
    outer = [p for p in model.parameters() if id(p) not in chosen]
    muon = {"params": inner, "initial_lr": 8e-3}
    adamw = {"params": outer, "initial_lr": 3e-3}
    return [
        torch.optim.Muon([muon], weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([adamw], betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def learn(model: Qwen3ForCausalLM, batch: Batch, run: Run) -> torch.Tensor:
    """The mean loss over the tokens that teach something; only for those are logits computed."""
    kinds = batch.kinds[:, 1:]
    taught = (kinds != NOTHING) & (batch.examples[:, 1:] == batch.examples[:, :-1])
    with torch.autocast("cpu", torch.bfloat16):
        states = model.model(input_ids=batch.tokens, attention_mask=batch.mask(), use_cache=False).last_hidden_state
        logits = model.lm_head(states[:, :-1][taught])
    losses = functional.cross_entropy(logits.float(), batch.tokens[:, 1:][taught], reduction="none")
    for index, kind in enumerate(KINDS):
        of_kind = losses.detach()[kinds[taught] == index]
        if len(of_kind):
            run.note(kind, of_kind.mean().item())
    return losses.mean()


if __name__ == "__main__":
    main()
