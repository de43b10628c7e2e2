"""Recurrent layers on a GPU that torch only pretends to have (see test_cuda_forward.py): where the host would wait, and
what a CUDA graph of a decode step could not repeat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")

from engine.attention import mla
from engine.attention.forward_context import Batch
from engine.gpu import layers
from engine.gpu.attention.paged_attention import TritonAttention
from engine.gpu.mixture import adoption
from engine.gpu.mixture import operators as mixture_operators
from engine.gpu.recurrent import kernels, norm_kernels, norms, operators  # noqa: F401  (makes the operators known)
from engine.kernels import experts, modules
from engine.loading.model_loader import load_model
from engine.runner import captured_steps, recurrences
from engine.runner.captured_steps import Uncapturable, by_modules
from engine.runner.mixers import Mixer, Mixers
from engine.runner.model_runner import ModelRunner, RunnerConfig
from loadtest.harness.random_checkpoints import HYBRID, make_module
from tests.engine.test_cuda_forward import (  # noqa: F401  (a fixture)
    BLOCK_SIZE,
    BLOCKS,
    GPU,
    LONGEST,
    STEPS,
    Launch,
    Waits,
    batch_of,
    pretended,
)

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is for CPU")

ROWS, SPARE = 4, BLOCKS * 4 - 1
EXPANDED = mla.Expanded(8, 8)  # of the tiny model with latents, Kimi-Linear's


@pytest.fixture(scope="module", params=sorted(HYBRID))
def family(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> tuple[str, ModelRunner]:
    """Its name, and its model on CPU, whose probe has learnt the facts."""
    name: str = request.param
    return name, load_model(str(checkpoint(f"tiny-{name}")), dtype=torch.bfloat16, device=torch.device("cpu"))


@pytest.fixture
def launched(pretended: dict[str, Launch], monkeypatch: pytest.MonkeyPatch) -> dict[str, Launch]:  # noqa: F811
    for module, names in (
        (kernels, ("gated_delta", "state_space_scan", "short_convolution", "short_convolution_step")),
        (norm_kernels, ("unit", "gated")),
        (mixture_operators.kernels, ("plan", "experts", "clamped_gate", "mix")),
    ):
        for name in names:
            pretended[name] = Launch()
            monkeypatch.setattr(module, name, pretended[name])
    return pretended


def pretend(name: str, learnt: ModelRunner) -> ModelRunner:
    """The family's model on the device, by Tandem's kernels."""
    module = make_module(f"tiny-{name}", torch.bfloat16, GPU)
    mla.use_latent_pages(module)
    for each in module.modules():  # as `mla.find_products`, which needs numbers
        if mla.expander(each) is not None:
            each.__dict__[mla._PRODUCT] = each.kv_b_proj
    config = RunnerConfig(
        max_model_len=LONGEST, fingerprint="", dtype=torch.bfloat16, device=GPU, block_size=BLOCK_SIZE
    )
    runner, own, mixers = ModelRunner(module, learnt.facts, config), dict(module.named_modules()), []
    assert learnt.mixers is not None
    for mixer in learnt.mixers.each:
        ours = Mixer(mixer.name, own[mixer.name], mixer.argument, mixer.layers)
        taken = recurrences.with_operators(type(ours.module))
        assert taken is not None
        ours.forward, ours.takes = taken
        mixers.append(ours)
    runner.mixers = Mixers(mixers, learnt.mixers.facts)
    runner.cuda_kernel = TritonAttention(LONGEST, EXPANDED) if learnt.facts else None
    for each in module.modules():  # as `layers.adopt`, whose trial needs numbers
        if layers.weight_of(each) is not None:
            each.__dict__[modules.REPLACEMENT] = layers.Linear
        elif "NormGated" in type(each).__name__:
            kind = norms.Gated(1e-6, 1, gate_first=True, silu=True, round_first=True)
            each.__dict__.update({modules.REPLACEMENT: norms.GatedNorm, norms.NORM: kind})
    for mixture in adoption.found_experts(module):  # as `adoption.adopt`
        sizes = tuple(tuple(each.shape) for each in experts.weights(mixture))
        mixture.__dict__.update({adoption._SIZES: sizes, modules.REPLACEMENT: adoption.Experts})
    runner.use_paged_attention()
    return runner


def slots_of(batch: Batch) -> Batch:
    batch.slots = list(range(len(batch.query_lens)))
    return batch


def test_recurrent_layers_never_wait_for_the_device(
    family: tuple[str, ModelRunner],
    launched: dict[str, Launch],
) -> None:
    """Neither in a prompt nor in a step of single tokens nor where sequences have unlike numbers of tokens."""
    runner = pretend(*family)
    pages = runner.allocate(BLOCKS * 4, slots=8)
    for name, sequences in STEPS.items():
        with Waits() as waits:
            runner.forward(pages, slots_of(batch_of(sequences)))
            pages.states.commit()  # type: ignore[union-attr]
        assert not waits.seen, name
    assert any(launched[name].launched for name in ("gated_delta", "state_space_scan", "short_convolution_step"))
    every = list(runner.module.modules())
    assert (launched["plan"].launched > 0) == any(adoption._SIZES in each.__dict__ for each in every)
    assert (launched["unit"].launched > 0) == (launched["gated_delta"].launched > 0)
    assert (launched["gated"].launched > 0) == any(norms.NORM in each.__dict__ for each in every)
    assert (launched["each_head"].launched > 0) == runner.latent == (family[0] == "kimi-linear")


def test_a_decode_step_can_be_repeated_without_python(
    family: tuple[str, ModelRunner], launched: dict[str, Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no list of the batch, waits for nothing, keeps no tensor and copies nothing from the host. Control: a
    recurrent layer whose state is copied by the host's orders."""
    runner = pretend(*family)
    pages = runner.allocate(BLOCKS * 4, slots=8)
    assert captured_steps.unfit(runner, pages) is None
    step, wanted = captured_steps._Static(runner, pages, ROWS, SPARE), torch.arange(ROWS, device=GPU)
    step.state_rows = torch.zeros(2, ROWS, dtype=torch.int64, device=GPU)

    def call() -> torch.Tensor:
        step.begin()
        logits = runner.run(step, wanted).float()
        step.plans.clear()
        return logits

    with Waits() as waits:
        logits = by_modules(lambda repeated: repeated)(call)()
    assert not waits.seen
    assert logits.shape == (ROWS, runner.vocab_size)
    assert runner.mixers is not None
    monkeypatch.setattr(runner.mixers.each[0], "takes", frozenset())
    with pytest.raises(RuntimeError, match="no operator reads the"):
        call()


def test_control_a_copy_from_the_host_in_a_decode_step_is_noticed(
    family: tuple[str, ModelRunner], launched: dict[str, Launch]
) -> None:
    """Of the rows of states: a replay would copy again what has been in the host's memory since."""
    if family[0] != "lfm2":
        pytest.skip("one family is enough")
    runner = pretend(*family)
    pages = runner.allocate(BLOCKS * 4, slots=8)
    step, wanted = captured_steps._Static(runner, pages, ROWS, SPARE), torch.arange(ROWS, device=GPU)

    step.state_rows = rows = torch.zeros(2, ROWS, dtype=torch.int64, device=GPU)

    def call() -> torch.Tensor:
        step.begin()
        rows.copy_(torch.zeros(2, ROWS, dtype=torch.int64), non_blocking=True)
        logits = runner.run(step, wanted).float()
        step.plans.clear()
        return logits

    with pytest.raises(Uncapturable, match=r"host and of the device in aten\.copy_"):
        by_modules(lambda repeated: repeated)(call)
