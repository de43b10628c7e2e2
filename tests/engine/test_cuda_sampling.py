"""Tokens chosen on a GPU that torch only pretends to have (see test_cuda_forward.py): how often the host waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, unset_fake_temporarily

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")

from engine import run_ahead
from engine.attention import forward_context
from engine.core.engine_config import EngineConfig
from engine.core.sequence import Sequence
from engine.decoding import logprobs, new_tokens, sampler
from engine.decoding.new_tokens import Run
from engine.engine import Engine
from engine.gpu import sampling
from engine.loading.model_loader import load_model
from tandem.sampling import GrammarSpec, Sampling
from tests.engine.test_cuda_forward import (  # noqa: F401  (a fixture)
    BLOCK_SIZE,
    BLOCKS,
    CPU,
    GPU,
    Launch,
    Waits,
    batch_of,
    pretend,
    pretended,
)

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is for CPU")


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the tensors that become lists of the host; what they hold is not known."""
    shapes: list[torch.Size] = []

    def tolist(tensor: torch.Tensor) -> Any:
        shapes.append(tensor.shape)
        return np.zeros(tensor.shape).tolist()

    monkeypatch.setattr(FakeTensor, "tolist", tolist)
    return shapes


def test_tokens_are_chosen_with_one_wait(pretended: dict[str, Launch], lists: list[torch.Size]) -> None:  # noqa: F811
    """For the tokens themselves, whatever the requests sample by."""
    rows = len(sampling.TRIED)
    with Waits() as waits:
        sampling.sample(torch.empty(rows, 384, device=GPU), sampling.TRIED, [0.5] * rows).tolist()
    assert lists == [torch.Size([rows])]
    assert not waits.seen
    assert pretended["choose_tokens"].launched == 1


@pytest.fixture
def driverless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the waits of a step, which need a driver, and without inference mode, in which no tensor is pretended."""
    monkeypatch.setattr(new_tokens, "choose", sampler.choose.__wrapped__)  # type: ignore[attr-defined]
    monkeypatch.setattr(run_ahead.RunAhead, "_queue", run_ahead.RunAhead._queue.__wrapped__)  # type: ignore[attr-defined]
    monkeypatch.setattr(forward_context, "done_behind", lambda device: lambda: None)
    monkeypatch.setattr(run_ahead, "done_behind", lambda device: lambda: None)


@pytest.mark.parametrize("problem", [None, "chooses other tokens"], ids=["it serves", "its trial failed"])
def test_an_engine_chooses_by_the_kernel_where_its_trial_went_well(
    problem: str | None,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    pretended: dict[str, Launch],  # noqa: F811
    lists: list[torch.Size],
    driverless: None,
) -> None:
    """Steps that are waited for, as a prompt's with log probabilities, and steps that are queued. Control: a kernel
    that chooses other tokens is not launched."""
    monkeypatch.setattr(sampler, "kernel_problem", lambda device: problem)
    monkeypatch.setattr(sampler, "_sample", lambda logits, *_: logits.argmax(-1))
    built = queued_engine(checkpoint)
    waited = Sampling(temperature=1.0, top_p=0.9, logit_bias=((3, 1.5),))
    launches = []
    for name, how in (("waited", waited), ("queued", Sampling(temperature=1.0, top_p=0.9))):
        built.add(Sequence(name, [5, 6, 7], 3, 5, frozenset(), how))
        built.step()  # the prompt
        before = built.ahead._launched
        built.step()
        assert (built.ahead._launched > before) == (name == "queued")
        built.drop(name)
        launches.append(pretended["choose_tokens"].launched)
    assert (launches[0] >= 2 and launches[1] >= launches[0] + 2) if problem is None else launches == [0, 0]


def queued_engine(checkpoint: Callable[[str], Path]) -> Engine:
    """Of a small model on the device, which queues its steps."""
    with unset_fake_temporarily():
        facts = load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=CPU).facts
    config = EngineConfig(num_blocks=BLOCKS * 4, block_size=BLOCK_SIZE, token_budget=64, max_running=4)
    built = Engine(pretend("llama", facts), config)
    assert built.ahead.on
    return built


def test_a_sampled_step_is_queued_without_a_wait(
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    pretended: dict[str, Launch],  # noqa: F811
    lists: list[torch.Size],
    driverless: None,
) -> None:
    """Whatever the requests sample by: the step in front of it still computes. Control: plain PyTorch reads a number
    back for top-p."""
    monkeypatch.setattr(sampler, "kernel_problem", lambda device: None)
    monkeypatch.setattr(run_ahead, "Tokens", lambda chosen: chosen)  # its copy has an event, which needs a driver
    built, rows = queued_engine(checkpoint), len(sampling.TRIED)
    batch = batch_of([(9, 1)] * rows)
    with Waits() as waits:
        chosen: Any = built.ahead._queue(batch, sampling.TRIED, None)
    assert chosen.device == GPU
    assert not waits.seen
    assert not lists
    assert pretended["choose_tokens"].launched == 1
    monkeypatch.setattr(sampler, "kernel_problem", lambda device: "fails")
    with pytest.raises(DataDependentOutputException):
        built.ahead._queue(batch, sampling.TRIED, None)


def test_what_changes_logits_is_put_in_the_queue(pretended: dict[str, Launch], lists: list[torch.Size]) -> None:  # noqa: F811
    """Bias, penalties, stop tokens and lists of tokens: the host copies numbers to the device and goes on."""
    options: list[dict[str, Any]] = [
        {"logit_bias": ((3, 1.5), (4, -2.0))},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"min_tokens": 4},
        {"allowed_token_ids": (1, 2, 3)},
        {"bad_words": ((7,), (8, 9))},
    ]
    sequences = [Sequence("", [5, 6, 7], 2, 100, frozenset({2}), Sampling(**one)) for one in options]
    with Waits() as waits:
        sampler.adjust(torch.empty(len(sequences), 384, device=GPU), sequences)
    assert not waits.seen
    assert not lists


def test_logprobs_take_one_wait(pretended: dict[str, Launch], lists: list[torch.Size]) -> None:  # noqa: F811
    """For all rows and all their likeliest tokens, those that are equally likely included, as all are here."""
    with Waits() as waits:
        logprobs.logprobs(torch.empty(3, 384, device=GPU), [1, 2, 3], [0, 5, 2])
    assert len(lists) == 1
    assert not waits.seen


OF_GRAMMAR = GrammarSpec("regex", "a")
ASKED: dict[str, dict[str, Any]] = {  # what each row of a step is asked for
    "log probabilities": {"logprobs": 5},
    "a grammar": {"grammar": OF_GRAMMAR},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": ((3, 1.5),)},
    "a grammar and limits": {"grammar": OF_GRAMMAR, "allowed_token_ids": (0, 1, 2), "logprobs": 0},
    "limits": {"bad_words": ((7,), (8, 9)), "min_tokens": 4, "temperature": 1.0, "top_p": 0.9},
    "nothing": {},
}


def waits_of_a_step(drafts: int = 0) -> list[str]:
    """Chooses the tokens of a step with all kinds of rows, of which the last has drafts. Returns the waits apart from
    those for lists. Every token is 0."""
    sequences = [
        Sequence(name, [5, 6, 7], 2, 100, frozenset({2}), Sampling(**how), grammar=how.get("grammar"))
        for name, how in ASKED.items()
    ]
    masked = [row for row, one in enumerate(sequences) if one.grammar is not None]
    bits = np.zeros((len(sequences), 384 // 32), dtype=np.int32)
    filling: Any = SimpleNamespace(bits=SimpleNamespace(numpy=lambda: bits), rows=masked, failed={}, wait=lambda: None)
    scored = 2  # rows of logits of a prompt's tokens, which another part of the step reads
    runs = [Run(one, [], scored + row) for row, one in enumerate(sequences)]
    runs[-1] = runs[-1]._replace(draft=[0] * drafts)
    logits = torch.empty(scored + len(runs) + drafts, 384, device=GPU)
    with Waits() as waits:
        progress = new_tokens.append_chosen(runs, logits, filling, None, compiled=True)
    assert [one.token for one in progress] == [0] * (len(runs) + drafts)
    assert all((one.logprob is None) == (one.sequence.sampling.logprobs is None) for one in progress)
    return waits.seen


@pytest.fixture
def by_the_kernel(monkeypatch: pytest.MonkeyPatch, pretended: dict[str, Launch], driverless: None) -> None:  # noqa: F811
    monkeypatch.setattr(sampler, "kernel_problem", lambda device: None)


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_step_waits_once_whatever_its_rows_are_asked_for(
    drafts: int, by_the_kernel: None, lists: list[torch.Size]
) -> None:
    """Tokens, log probabilities, and whether a grammar or limits leave a token, come in one list; each draft that was
    right takes one more."""
    assert waits_of_a_step(drafts) == []
    assert len(lists) == 1 + drafts


@pytest.mark.parametrize(
    ("module", "name", "slow", "seen"),
    [
        (sampler, "on_device", lambda values, dtype, _: torch.tensor(values, dtype=dtype), "indices of the host"),
        (new_tokens, "rows_of", lambda logits, rows: logits[rows], "indices of the host"),
        (
            sampling,
            "on_device",
            lambda values, dtype, device: torch.tensor(values, dtype=dtype).to(device, non_blocking=True),
            "not pinned",
        ),
    ],
    ids=["rows with log probabilities", "rows of a step", "masks"],
)
def test_control_indices_of_the_host_are_waits(
    module: Any,
    name: str,
    slow: Any,
    seen: str,
    by_the_kernel: None,
    lists: list[torch.Size],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the sampler had them: a list is copied to the device from memory that is not pinned, as the masks were."""
    monkeypatch.setattr(module, name, slow)
    if module is sampler:
        monkeypatch.setattr(sampler, "adjust", lambda *_: None)  # it adds numbers of the host, which is an error
    assert any(seen in one for one in waits_of_a_step())
