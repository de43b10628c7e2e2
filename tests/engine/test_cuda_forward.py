"""Steps on a GPU that torch only pretends to have: tensors with shapes and devices and without data.

They show where the host would wait for the device and where tensors of two devices meet; numbers are in other tests.
They need torch for CUDA, as PyPI has it, and no driver. torch for CPU skips them; `make test-cuda` installs the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")

from engine import run_ahead
from engine.attention import forward_context, mla
from engine.attention.forward_context import BASE, Batch, Step
from engine.core.engine_config import EngineConfig
from engine.core.sequence import Sequence
from engine.decoding import new_tokens, sampler
from engine.engine import Engine
from engine.gpu import codes, layers, products, sampling, sampling_kernel
from engine.gpu.attention import paged_attention
from engine.gpu.attention.paged_attention import TritonAttention
from engine.kernels import modules
from engine.kv.kv_cache import KvCache
from engine.kv.kv_converter import KvConverter
from engine.loading import gptq_awq_fp8
from engine.loading.lora_attachment import Wanted, attach
from engine.loading.model_loader import load_model
from engine.runner import lora as lora_module
from engine.runner.lora import Adapter, LowRank
from engine.runner.model_runner import KvDtype, ModelRunner, RunnerConfig
from loadtest.harness.random_checkpoints import TINY, make_module
from tandem.sampling import Sampling
from tests.engine.conftest import two_layers
from tests.engine.test_kv_converter import layout

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is for CPU")

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BLOCK_SIZE, BLOCKS, LONGEST = 16, 16, 512
EXPANDED = mla.Expanded(16, 20)  # of the tiny models with latents
STEPS = {  # (done, new) of each sequence
    "a prompt": [(0, 21)],
    "single tokens": [(17, 1), (300, 1), (0, 1)],
    "both": [(0, 7), (40, 9), (33, 1), (35, 1), (5, 1)],
}


class Waits(TorchDispatchMode):
    """Notes copies between device and host for which the host waits: all to the host, and to the device those that are
    not put in the queue, such as indices of the host into a tensor of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        names = (one.name for one in operator._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        into, source = (given["self"], given["src"]) if "src" in given else (out, given.get("self"))
        copies = isinstance(into, torch.Tensor) and isinstance(source, torch.Tensor) and into.device != source.device
        if copies and (into.device.type == "cpu" or not given.get("non_blocking")):
            self.seen.append(f"{operator} from {source.device} to {into.device}")
        listed = given.get("indices")  # of `tensor[...]`; an embedding's are one tensor
        indices = [one for one in listed if isinstance(one, torch.Tensor)] if isinstance(listed, list | tuple) else []
        if indices and given["self"].device.type != "cpu" and any(one.device.type == "cpu" for one in indices):
            self.seen.append(f"{operator} of {given['self'].device} by indices of the host")
        return out


class Launch:
    """Stands for a kernel: `kernel[grid](tensors, ...)`. All its tensors must be on the device."""

    def __init__(self) -> None:
        self.launched = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid)
        return self._launch

    def _launch(self, *given: Any, **fixed: Any) -> None:
        self.launched += 1
        assert {one.device for one in given if isinstance(one, torch.Tensor)} == {GPU}


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Launch]]:
    """Everything made inside is without data; `cuda` is a device. What only a driver can do is left out."""
    launches = {name: Launch() for name in ("attend", "merge", "choose_tokens", "linear", "each_head", "rms_norm")}
    tensor = torch.tensor
    inference_mode = torch.inference_mode
    monkeypatch.setattr(paged_attention, "attend", launches["attend"])
    monkeypatch.setattr(paged_attention, "merge", launches["merge"])
    monkeypatch.setattr(sampling_kernel, "choose_tokens", launches["choose_tokens"])
    monkeypatch.setattr(products.kernels, "linear", launches["linear"])
    monkeypatch.setattr(products.kernels, "each_head", launches["each_head"])
    monkeypatch.setattr(products.kernels, "rms_norm", launches["rms_norm"])
    monkeypatch.setattr(torch, "tensor", lambda *given, pin_memory=False, **more: tensor(*given, **more))
    monkeypatch.setattr(torch, "inference_mode", lambda *given: inference_mode(*given) if given else torch.no_grad())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with FakeTensorMode():
        yield launches


def pretend(family: str, facts: Any, kv_dtype: KvDtype = "auto") -> ModelRunner:
    """The family's model on the device, with the layers of the tests' checkpoint."""
    module = make_module(f"tiny-{family}", torch.bfloat16, GPU, **two_layers(f"tiny-{family}"))
    mla.use_latent_pages(module)
    for each in module.modules():  # as `mla.find_products`, which needs numbers
        if mla.expander(each) is not None:
            each.__dict__[mla._PRODUCT] = each.kv_b_proj
    runner = ModelRunner(
        module,
        facts,
        RunnerConfig(
            max_model_len=LONGEST,
            fingerprint="",
            dtype=torch.bfloat16,
            device=GPU,
            block_size=BLOCK_SIZE,
            kv_dtype=kv_dtype,
        ),
    )
    runner.cuda_kernel = TritonAttention(LONGEST, EXPANDED)
    for each in module.modules():  # as `layers.adopt`, whose trial needs numbers
        if layers.weight_of(each) is not None:
            each.__dict__[modules.REPLACEMENT] = layers.Linear
        elif "RMSNorm" in type(each).__name__ and len(each._parameters) == 1 and not each._buffers:
            each.__dict__.update({modules.REPLACEMENT: layers.RmsNorm, modules.NORM: (1e-6, 0.0, True)})
    runner.use_paged_attention()
    return runner


def batch_of(sequences: list[tuple[int, int]]) -> Batch:
    batch, free = Batch(), iter(range(BLOCKS * 4))
    for done, new in sequences:
        table = [next(free) for _ in range(-(-(done + new) // BLOCK_SIZE))]
        batch.add([1] * new, done, table, [new - 1])
    return batch


@pytest.fixture(scope="module", params=sorted(TINY))
def family(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> tuple[str, Any]:
    """Its name, and the facts that its probe learns."""
    name: str = request.param
    return name, load_model(str(checkpoint(f"tiny-{name}")), dtype=torch.float32, device=CPU).facts


def test_a_forward_never_waits_for_the_device(family: tuple[str, Any], pretended: dict[str, Launch]) -> None:
    """Nothing in it depends on the data of a tensor, and no operator gets tensors of two devices."""
    runner = pretend(*family)
    pages = runner.allocate(BLOCKS * 4)
    for name, sequences in STEPS.items():
        with Waits() as waits:
            logits = runner.forward(pages, batch_of(sequences))
        assert not waits.seen, name
        assert logits.device == GPU
        assert logits.shape == (len(sequences), runner.vocab_size)
    assert pretended["attend"].launched > 0
    assert (pretended["each_head"].launched > 0) == runner.latent
    assert pretended["linear"].launched > 0


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (lambda logits: logits.argmax(-1).tolist(), DataDependentOutputException),
        (lambda logits: logits[logits[:, 0] > 0], DynamicOutputShapeException),
        (lambda logits: logits + torch.ones(logits.shape), RuntimeError),
        (lambda logits: logits.cpu(), AssertionError),
    ],
    ids=["it asks for a number", "a shape depends on data", "two devices", "a copy to the host"],
)
def test_a_forward_that_waits_is_noticed(
    fault: Callable[[torch.Tensor], Any],
    error: type[Exception],
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    pretended: dict[str, Launch],
) -> None:
    """The control."""
    with unset_fake_temporarily():
        facts = load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=CPU).facts
    by_modules = ModelRunner.by_modules

    def waits(self: ModelRunner, step: Step, wanted: torch.Tensor) -> torch.Tensor:
        logits = by_modules(self, step, wanted)
        fault(logits)
        return logits

    monkeypatch.setattr(ModelRunner, "by_modules", waits)
    with pytest.raises(error):
        test_a_forward_never_waits_for_the_device(("llama", facts), pretended)


def test_quantised_pages_are_written_and_read_without_a_wait(
    checkpoint: Callable[[str], Path], pretended: dict[str, Launch]
) -> None:
    """By the kernel, also where pages have latents."""
    for name in ("llama", "deepseek-v3"):
        with unset_fake_temporarily():
            facts = load_model(str(checkpoint(f"tiny-{name}")), dtype=torch.float32, device=CPU).facts
        runner = pretend(name, facts, "int8")
        pages = runner.allocate(BLOCKS * 4)
        assert pages.k[0].dtype == torch.int8
        with Waits() as waits:
            runner.forward(pages, batch_of(STEPS["both"]))
        assert not waits.seen, name


def test_adapters_are_added_without_a_wait(checkpoint: Callable[[str], Path], pretended: dict[str, Launch]) -> None:
    """Which rows have which adapter, of which rank, the host knows."""
    with unset_fake_temporarily():
        facts = load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=CPU).facts
    runner = pretend("llama", facts)
    lora = attach(runner, Wanted({}, slots=2, later_rank=8))
    terms = {
        name: LowRank(torch.ones(8, place.width), torch.ones(place.height, 8), 2.0)
        for name, place in lora.places.items()
    }
    lora.put(1, Adapter("red", Path(), b"red", terms))
    batch = batch_of(STEPS["both"])
    batch.adapters = [1, BASE, 1, BASE, BASE]
    added: list[int] = []
    product = lora_module._product
    with Waits() as waits, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora_module, "_product", lambda x, *more: (added.append(len(x)), product(x, *more))[1])
        runner.forward(runner.allocate(BLOCKS * 4), batch)
    assert not waits.seen
    assert added == [8] * len(terms)


def test_columns_in_another_order_are_multiplied_on_the_device(
    pretended: dict[str, Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of GPTQ with desc_act: their order is where the codes are, as the weight is read back and as it serves."""
    n, k, group = 40, 128, 32
    found = gptq_awq_fp8.Coded(
        torch.empty(n, k, dtype=torch.int16), torch.empty(n, k // group), group, "int4",
        torch.empty(k, dtype=torch.int64), torch.empty(k // group, dtype=torch.int64),
    )  # fmt: skip
    monkeypatch.setattr(gptq_awq_fp8.Product, "coded", lambda product: found)
    monkeypatch.setattr(gptq_awq_fp8.Product, "weight", lambda product: torch.empty(n, k))
    monkeypatch.setattr(torch, "equal", lambda one, other: one.dim() == 2)  # a weight read back; the order is another
    monkeypatch.setattr(codes, "differs", lambda *_: False)
    product = gptq_awq_fp8.Product("", lambda *_: torch.empty(n, k), None, found.scales, found.order, group)
    own = product.codes(codes.packer(GPU))
    assert own is not None
    assert own.order is not None
    with Waits() as waits:
        out = own.multiply(torch.empty(3, k, dtype=torch.bfloat16, device=GPU), None)
    assert out.device == GPU
    assert not waits.seen
    assert pretended["linear"].launched == 1


@pytest.mark.parametrize(("theirs", "ours"), [(torch.int8, torch.int8), (torch.bfloat16, torch.int8)], ids=str)
def test_kv_is_converted_with_one_wait(theirs: torch.dtype, ours: torch.dtype, pretended: dict[str, Launch]) -> None:
    """For the places, whatever the number of attention calls. Control: indices of the host wait each time."""
    source, target = layout(8, theirs), layout(16, ours)
    converter = KvConverter(source, 4, KvCache(target, 4, GPU))
    with Waits() as waits:
        converter.convert([(0, 0), (3, 1), (2, 2)], [1, 0], range(3, 24))
    assert len(waits.seen) == 1, waits.seen
    view = converter.staging.k[0]
    with Waits() as waits:
        view[torch.tensor([0, 1])] = view[torch.tensor([1, 2])]
    assert len(waits.seen) == 2


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the tensors that become lists of the host; what they hold is not known."""
    shapes: list[torch.Size] = []

    def tolist(tensor: torch.Tensor) -> Any:
        shapes.append(tensor.shape)
        return np.zeros(tensor.shape).tolist()

    monkeypatch.setattr(FakeTensor, "tolist", tolist)
    return shapes


def test_tokens_are_chosen_with_one_wait(pretended: dict[str, Launch], lists: list[torch.Size]) -> None:
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
    pretended: dict[str, Launch],
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
    pretended: dict[str, Launch],
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


def test_what_changes_logits_is_put_in_the_queue(pretended: dict[str, Launch], lists: list[torch.Size]) -> None:
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


def test_logprobs_take_one_wait(
    pretended: dict[str, Launch], lists: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all rows and all their likeliest tokens, apart from those that are equally likely, as all are here."""
    monkeypatch.setattr(sampler, "_from", lambda logits, least: [0] * 5)
    with Waits() as waits:
        sampler.logprobs(torch.empty(3, 384, device=GPU), [1, 2, 3], [0, 5, 2])
    assert len(lists) == 1
    assert not waits.seen
