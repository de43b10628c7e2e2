"""The sampling kernel of a GPU, by Triton's interpreter: it chooses the tokens that plain PyTorch chooses."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")

from engine.decoding import sampler, structured_output
from engine.decoding.sampler import _numbers, _sample, kernel_problem, uniform
from engine.gpu import sampling as gpu
from engine.kernels import REFERENCE
from engine.runner.model_runner import ModelRunner
from tandem.sampling import Sampling
from tests.engine.stand_ins import Asked

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)  # the latter is only named
TEMPERATURES = st.sampled_from([0.0, 1e-30, 0.3, 1.0, 100.0])
HOW = st.builds(
    Sampling,
    temperature=TEMPERATURES,
    top_k=st.sampled_from([0, 1, 2, 7, 40, 10**9]),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)
# Those of a model, a few values that many tokens share, and rows that a grammar has masked.
LOGIT = st.one_of(
    st.floats(-30, 30, width=32),
    st.sampled_from([-1.0, 0.0, -0.0, 1.0]),
    st.just(-math.inf),
)


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Any:
    """So that a short row has several; the interpreter takes a millisecond for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "TILE", 64)
        yield


def by_kernel(logits: torch.Tensor, how: list[Sampling], positions: list[int]) -> list[int]:
    return gpu.sample(logits, how, _numbers(how, positions)).tolist()


@settings(max_examples=12, deadline=None)
@given(
    row=st.lists(LOGIT, min_size=1, max_size=100), how=st.lists(HOW, min_size=1, max_size=2), at=st.integers(0, 10**6)
)
def test_it_chooses_what_plain_pytorch_chooses(row: list[float], how: list[Sampling], at: int) -> None:
    """Any mix of filters, ties, zeros of both signs, masked tokens, and vocabularies of one token and more. The order
    of its sums decides a token in some 10^13, so no example is expected to meet it."""
    logits = torch.tensor([row] * len(how))
    positions = [at] * len(how)
    assert by_kernel(logits, how, positions) == _sample(logits.clone(), how, positions).tolist()


def test_many_draws_of_one_row_are_those_of_plain_pytorch() -> None:
    """The whole way along the cumulative weights, with rows that lie apart in memory."""
    generator = torch.Generator().manual_seed(5)
    wide = 3.0 * torch.randn(16, 120, generator=generator)
    logits, positions = wide[:, 7:105], list(range(16))
    filtered = Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=4)  # 64 passes over a row
    for how, rows in ((Sampling(temperature=1.0, seed=3), 16), (filtered, 4)):
        chosen = by_kernel(logits[:rows], [how] * rows, positions[:rows])
        assert chosen == _sample(logits[:rows].clone(), [how] * rows, positions[:rows]).tolist()
        assert len(set(chosen)) > rows // 4


def test_a_row_whose_largest_logit_is_not_finite_has_no_token() -> None:
    """NaN anywhere, infinity, all masked; greedy and drawn. Its neighbours have theirs."""
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    logits[0, 39], logits[2, 3] = math.nan, math.inf
    logits[3] = -math.inf
    for how in (Sampling(), Sampling(temperature=1.0, top_k=3, top_p=0.9)):
        chosen = by_kernel(logits, [how] * 5, [0] * 5)
        assert [token == -1 for token in chosen] == [True, False, True, True, False]
        assert chosen == _sample(logits.clone(), [how] * 5, [0] * 5).tolist()


def test_the_largest_number_below_one_draws_a_token_that_is_possible() -> None:
    """Though its share of the weights may round to all of them; 0 draws the first possible token."""
    logits = torch.full((2, 70), -math.inf)
    logits[:, [3, 50, 64]] = 0.1
    how = [Sampling(temperature=0.7)] * 2
    assert gpu.sample(logits, how, [math.nextafter(1.0, 0.0), 0.0]).tolist() == [64, 3]


def test_each_filter_keeps_the_tokens_that_it_should_and_no_more() -> None:
    """The largest random number draws the last of those that stay: each token is half as likely as the one before."""
    logits = (-math.log(2.0) * torch.arange(70.0)).repeat(3, 1)
    how = [
        Sampling(temperature=1.0, top_k=5),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=1.0, min_p=0.2),
    ]
    assert gpu.sample(logits, how, [math.nextafter(1.0, 0.0)] * 3).tolist() == [4, 3, 2]


def test_no_rows_have_no_tokens() -> None:
    """As by plain PyTorch: a draft model samples whatever sequences are ready, and none may be."""
    logits = torch.empty(0, 40)
    for found in (gpu.sample(logits, [], []), _sample(logits.clone(), [], [])):
        assert (found.shape, found.dtype) == ((0,), torch.int64)


def test_a_large_batch_shares_the_memory_of_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, one after another, with the same tokens."""
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(2))
    how = [Sampling(temperature=1.0, min_p=0.1, seed=seed) for seed in range(40)]
    expected = by_kernel(logits, how, [1] * 40)
    made: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: (made.append(size[0]), empty(*size, **kind))[1])
    monkeypatch.setattr(gpu, "WORKSPACE", 1000)
    assert by_kernel(logits, how, [1] * 40) == expected
    assert made == [40, 16 * 50]


class Compiled:
    """A kernel that computes nothing and notes for what Triton would compile it: for numbers that are multiples of 16,
    and for tensors that begin at one."""

    def __init__(self) -> None:
        self.kinds: set[tuple[bool, ...]] = set()

    def __getitem__(self, grid: Any) -> Any:
        def launch(*given: Any, **_: Any) -> None:
            starts = (one.data_ptr() if isinstance(one, torch.Tensor) else one for one in given)
            self.kinds.add(tuple(start % 16 == 0 for start in starts))

        return launch


@pytest.mark.parametrize("vocab", [129280, 151936, 200064, 50257])
def test_no_request_waits_for_a_compiler(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial at load has launched what any batch launches, in parts or whole."""
    kernel = Compiled()
    monkeypatch.setattr("engine.gpu.sampling_kernel.choose_tokens", kernel)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    assert gpu.problem(CPU, lambda *_: torch.zeros(len(gpu.TRIED), dtype=torch.int64), uniform) is None
    tried = set(kernel.kinds)
    monkeypatch.setattr(gpu, "WORKSPACE", 3 * vocab)
    for rows in (1, 40):
        gpu.sample(torch.empty(rows, vocab), [Sampling(temperature=1.0)] * rows, [0.5] * rows)
        gpu.sample(torch.empty(rows, vocab), [Sampling()] * rows, [0.0] * rows)
    assert kernel.kinds == tried


@pytest.mark.parametrize("vocab", [64, 77])
def test_grammars_forbid_the_same_tokens_on_a_gpu(vocab: int) -> None:
    """As xgrammar's operator for CPU, in some rows of a step, without a compiler and without a wait."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (5, -(-vocab // 32)), generator=generator, dtype=torch.int32)
    bits[1] = -1
    logits = torch.randn(5, vocab, generator=generator)
    expected = logits.clone()
    masks: Any = SimpleNamespace(bits=bits, rows=[1, 2, 4])
    structured_output.apply(expected, masks)  # by xgrammar
    gpu.forbid(logits, bits, [1, 2, 4])
    assert torch.equal(logits, expected)
    assert logits[2].isinf().any()
    assert not logits[0].isinf().any()


def test_the_host_waits_for_the_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-p included, which in plain PyTorch waits once more. (`tolist` is no operator: it is the one wait.)"""
    monkeypatch.setattr("engine.gpu.sampling_kernel.choose_tokens", Launched())
    monkeypatch.setattr(gpu, "on_device", lambda values, dtype, _: torch.ones(len(values), 5, dtype=dtype))
    with Asked() as asked:
        gpu.sample(torch.zeros(2, 8), [Sampling(temperature=1.0, top_p=0.9)] * 2, [0.5, 0.5])
    assert asked.names == []


class Launched:
    """A kernel that is launched and computes nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


def test_a_kernel_that_chooses_otherwise_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial at load compares it with plain PyTorch; control: one whose random numbers are others."""
    monkeypatch.setattr(gpu, "TRIED", gpu.TRIED[:3])  # without filters, which take many passes
    assert gpu.problem(CPU, _sample, uniform) is None
    assert gpu.problem(CPU, _sample, lambda seed, at: uniform(seed + 1, at)) == "chooses other tokens"
    monkeypatch.setattr("engine.gpu.sampling_kernel.choose_tokens", None)
    assert "fails" in str(gpu.problem(CPU, _sample, uniform))


def test_on_cuda_it_serves_where_its_trial_went_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for a device; on CPU there is none."""
    tried: list[str | None] = [None, "chooses other tokens"]
    monkeypatch.setattr(gpu, "problem", lambda *_: tried[0])
    kernel_problem.cache_clear()
    assert kernel_problem(CUDA) is None
    assert kernel_problem(CPU) == "the device is cpu"
    del tried[0]
    assert kernel_problem(CUDA) is None
    kernel_problem.cache_clear()
    assert kernel_problem(CUDA) == "chooses other tokens"
    kernel_problem.cache_clear()


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_model_on_cuda_draws_by_the_kernel_though_no_operators_of_the_cpu_serve_there(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its trial alone; as the engine and its queued steps ask (tests/engine/test_cuda_sampling.py). Control: on CPU
    a model without the operators draws by plain PyTorch."""
    model: Any = SimpleNamespace(device=device, kernels=REFERENCE)
    compiled = ModelRunner.draws_compiled.fget(model)  # type: ignore[attr-defined]
    monkeypatch.setattr(sampler, "_sample", lambda *_: torch.tensor([1]))
    monkeypatch.setattr(gpu, "sample", lambda *_: torch.tensor([2]))
    logits: Any = SimpleNamespace(device=device)
    for problem, chosen in ((None, 2), ("chooses other tokens", 1)):
        monkeypatch.setattr(sampler, "kernel_problem", lambda _, problem=problem: problem)
        assert sampler.sample(logits, [Sampling()], [0], compiled=compiled) == [chosen if device == CUDA else 1]
