"""The mixtures of experts of a GPU, by Triton's interpreter: their numbers, that a row's bits follow from the row, and
that nothing waits for who was chosen. No GPU has run those over codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")

from engine.attention.forward_context import Batch
from engine.gpu import codes as gpu_codes
from engine.gpu import layers, products
from engine.gpu.attention.paged_attention import TritonAttention
from engine.gpu.codes import RowStack, packer
from engine.gpu.mixture import adoption, operators
from engine.gpu.operators import ops
from engine.gpu.products import Tiling
from engine.kernels import experts, is_nothing, modules, weight_quantization
from engine.loading.model_loader import load_model
from engine.runner import captured_steps, traced_forward
from loadtest.harness.random_checkpoints import make_checkpoint, make_module
from tandem.errors import CheckpointRefused
from tests.engine.test_gpu_codes import random_codes
from tests.engine.test_gpu_recording import SMALL, Kernels, Noted, with_context

CPU = torch.device("cpu")
# Most; with biases, columns side by side and a gate of their own; beside a shared expert; without a gate; with a router
# in float32.
FAMILIES = ["mixtral", "gpt-oss", "qwen2-moe", "nemotron-h", "deepseek-v3"]
WIDE_TILES = "mixtral"  # the family whose trial has them
EXPERTS, EACH, N, K = 5, 2, 70, 50
MIXTURE = ["linear", "aten.softmax.int", "aten.topk.default", "plan", "experts", "experts"]  # kernels before the sum
MANY = products.FEW * EXPERTS // EACH + 1  # tokens whose experts have wide tiles


@pytest.fixture(autouse=True, scope="module")
def short_trials() -> Iterator[None]:
    """With fewer rows, for the interpreter takes its time; both kinds of tiles are among them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adoption, "SOME", (1, 5))
        patch.setattr(layers, "ROWS", (1, 5))
        yield


def operands(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Rows, their experts, weights and biases. One expert is chosen by all, and one by nobody."""
    generator = torch.Generator().manual_seed(0)
    liked = torch.rand(tokens, EXPERTS, generator=generator)
    liked[:, 1] += 1
    liked[:, 3] -= 1
    shapes = ((tokens, K), (EXPERTS, N, K), (EXPERTS, N))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, liked.topk(EACH).indices, weight, bias


def multiply(
    x: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool = False
) -> torch.Tensor:
    plan = ops.experts_plan(x, chosen, EXPERTS)
    out: torch.Tensor = ops.experts(x, chosen, plan, weight, bias, transposed, EXPERTS, N, K)
    return out


@pytest.mark.parametrize("tokens", [1, 7, MANY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_each_pair_is_multiplied_by_the_weight_of_its_expert(tokens: int, dtype: torch.dtype) -> None:
    """The bits of a layer's product with that expert's weight, in tiles of both sizes, and torch's numbers."""
    x, chosen, weight, bias = operands(tokens, dtype)
    found = multiply(x, chosen, weight, bias)
    apart = weight.transpose(1, 2).contiguous()
    assert torch.equal(multiply(x, chosen, apart, bias, transposed=True), found)
    assert torch.equal(multiply(x[:0], chosen[:0], weight, None), found[:0])
    for at, expert in list(enumerate(chosen.flatten().tolist()))[:: max(1, tokens // 20)]:
        alone = products.linear(x[at // EACH, None], weight[expert], bias[expert])
        assert torch.equal(found[at], alone[0])
    exact = torch.einsum("tk,tenk->ten", x.double(), weight[chosen].double()) + bias[chosen].double()
    allowed = 1e-5 if dtype == torch.float32 else 2**-10
    assert (found.view(exact.shape) - exact).abs().max() / exact.std() < allowed * 3


@pytest.mark.parametrize("tokens", [1, 7, MANY])
@pytest.mark.parametrize(("format", "group", "zeros"), [("int8", K, False), ("fp8", K, False), ("int4", 32, True)])
def test_each_pair_is_multiplied_by_the_codes_of_its_expert(format: str, group: int, zeros: bool, tokens: int) -> None:
    """The bits of a layer's product over that expert's codes, in tiles of both sizes, with or without zeros; alone and
    among all; none of what lies beyond the codes is read."""
    x, chosen, _, bias = operands(tokens)
    each = [random_codes(N, K, group, format, zeros, seed=expert) for expert in range(EXPERTS)]
    codes, scales = torch.stack([one.codes for one in each]), torch.stack([one.scales for one in each])
    own = torch.stack([one.zeros for one in each]) if zeros else None  # type: ignore[misc]

    def over_codes(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        plan = ops.experts_plan(x, chosen, EXPERTS, each[0].depth)
        numbers = (EXPERTS, N, K, group, each[0].depth, format)
        out: torch.Tensor = ops.experts_codes(x, chosen, plan, codes, scales, own, bias, *numbers)
        return out

    found = over_codes(x, chosen)
    assert torch.equal(over_codes(x[:0], chosen[:0]), found[:0])
    assert torch.equal(over_codes(x[-1:], chosen[-1:]), found[-EACH:])
    for at, expert in list(enumerate(chosen.flatten().tolist()))[:: max(1, tokens // 20)]:
        alone = each[expert].multiply(x[at // EACH, None], bias[expert])
        assert torch.equal(found[at], alone[0])


def test_the_rows_of_pairs_are_multiplied_in_their_order() -> None:
    """A second product has a row for each pair."""
    x, chosen, weight, bias = operands(7)
    pairs = x.repeat_interleave(EACH, 0)
    plan = ops.experts_plan(pairs, chosen, EXPERTS)
    found = ops.experts(pairs, chosen, plan, weight, bias, False, EXPERTS, N, K)
    assert torch.equal(found, multiply(x, chosen, weight, bias))
    with pytest.raises(TypeError, match=r"rows in torch.float16 and weights"):
        multiply(x.half(), chosen, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rows_bits_follow_from_the_row(dtype: torch.dtype) -> None:
    """Alone, among few and among many, in any place: bit for bit, by narrow tiles and by others."""
    x, chosen, weight, bias = operands(MANY, dtype)
    together = multiply(x, chosen, weight, bias).view(MANY, EACH, N)
    assert len({operators.tiling(pairs, EXPERTS, N, dtype, 90) for pairs in (1, MANY * EACH)}) == 2
    for rows in (slice(5, 6), slice(1, 4), slice(1, MANY)):
        assert torch.equal(multiply(x[rows], chosen[rows], weight, bias).view(-1, EACH, N), together[rows]), rows
    assert torch.equal(multiply(x.flip(0), chosen.flip(0), weight, bias).view(-1, EACH, N), together.flip(0))


@settings(max_examples=25)
@given(
    choices=st.lists(st.integers(-1, 4), max_size=150),
    count=st.sampled_from([1, 4]),
    rows=st.sampled_from([16, 32]),
    chunk=st.sampled_from([16, 1024]),
)
def test_every_pair_is_in_one_tile_of_its_expert(choices: list[int], count: int, rows: int, chunk: int) -> None:
    """In the order of the pairs, whoever was chosen, in as many tiles as there is room for. Who does not exist is in
    none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "CHUNK", chunk)
        patch.setattr(operators, "tiling", lambda *_: Tiling(rows, 32, 32, 4, 3))
        plan = ops.experts_plan(torch.zeros(1, 1), torch.tensor(choices).view(-1, 1), count).tolist()
    tiles = operators.tiles(len(choices), count, rows)
    pairs, (experts, begins, ends) = plan[: len(choices)], torch.tensor(plan[len(choices) :]).view(3, tiles).tolist()
    found: list[tuple[int, int]] = []
    for expert, begin, end in zip(experts, begins, ends, strict=True):
        if expert >= 0:
            assert begin < end
            found += [(expert, pair) for pair in pairs[begin : min(end, begin + rows)]]
    assert found == sorted((expert, pair) for pair, expert in enumerate(choices) if 0 <= expert < count)


@pytest.mark.parametrize("of", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_tokens_pairs_are_summed_as_torch_rounds(dtype: torch.dtype, of: torch.dtype) -> None:
    """The products are rounded where both factors have 16 bits, and the sum once."""
    generator = torch.Generator().manual_seed(0)
    y, shares = torch.randn(14, 1030, generator=generator).to(dtype), torch.rand(7, 2, generator=generator).to(of)
    expected = (y * shares.view(-1, 1)).view(7, 2, -1).sum(1).to(dtype)
    found = ops.experts_sum(y, shares, y)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    assert torch.equal(ops.experts_sum(y[4:6], shares[2:3], y), found[2:3])
    assert ops.experts_sum(y[:0], shares[:0], y).shape == (0, 1030)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_gate_and_up_may_be_columns_of_one_product(act: str) -> None:
    """The bits of a gate over tensors of their own."""
    both = torch.randn(5, 2100)
    gate, up = both.chunk(2, -1)
    assert torch.equal(products.gated(gate, up, act), products.gated(gate.contiguous(), up.contiguous(), act))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
def test_gpt_oss_gate_rounds_as_torch_does(interleaved: bool, dtype: torch.dtype) -> None:
    """Also what is not a number."""
    both = (torch.randn(5, 2100, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    both[3, 7:9] = torch.nan
    found = ops.clamped_gate(both, 7.0, 1.702, interleaved)
    gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    assert found.dtype == dtype
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.allclose(found, expected, rtol=1e-5 if dtype == torch.float32 else 2**-9, atol=1e-6, equal_nan=True)
    assert (found != expected)[~found.isnan()].float().mean() < (1 if dtype == torch.float32 else 0.01)
    assert ops.clamped_gate(both[:0], 7.0, 1.702, interleaved).shape == (0, 1050)


def test_a_gate_is_recognised_by_its_results() -> None:
    """gpt-oss's, with its numbers; control: the same module with another gate, and others' gates, keep their own."""
    module: Any = next(adoption.found_experts(random_model("gpt-oss")))
    assert adoption.gate_of(module) == (module.limit, module.alpha, True)
    module.limit, module.alpha = 3.0, 1.5
    assert adoption.gate_of(module) == (3.0, 1.5, True)
    gate = module._apply_gate
    module._apply_gate = lambda both: gate(both).clamp(min=-1)
    assert adoption.gate_of(module) is None
    assert not [each for each in adoption.found_experts(random_model("mixtral")) if adoption.gate_of(each)]


def random_model(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = make_module(f"tiny-{family}", dtype, CPU).eval()
    for mixture in adoption.found_experts(model):
        for each in mixture.parameters():
            torch.nn.init.normal_(each, std=0.2)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_mixtures_equal_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts and routers, in float32; a row has the same bits alone; they can be switched back."""
    if family != WIDE_TILES:
        monkeypatch.setattr(adoption, "MEANS", ())
    model = random_model(family)
    mixtures, routers = list(adoption.found_experts(model)), list(adoption.found_routers(model))
    assert adoption.adopt(model) == f"{len(mixtures)} mixtures, {len(routers)} routers"
    assert len(mixtures) == len(routers) > 0
    for mixture, router in zip(mixtures, routers, strict=True):
        x = torch.randn(9, router.weight.shape[1])  # type: ignore[arg-type, union-attr]
        outs = []
        for on in (False, True):
            modules.switch(model, on)
            assert isinstance(mixture, adoption.Experts) == isinstance(router, adoption.Router) == on
            logits, shares, chosen = router(x)
            outs.append((logits, shares, mixture(x, chosen, shares)))
        for theirs, ours in zip(*outs, strict=True):
            assert (theirs - ours).abs().max() / theirs.std() < 1e-5
        logits, shares, chosen = router(x[-1:])
        for alone, ours in zip((logits, shares, mixture(x[-1:], chosen, shares)), outs[1], strict=True):
            assert torch.equal(alone[0], ours[-1])


@pytest.mark.parametrize(("family", "format"), [("mixtral", "int4"), ("gpt-oss", "int8")])
def test_mixtures_over_codes_equal_those_that_torch_widens(
    family: str, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded at load; the weights are dropped; a row has the same bits alone; they can be switched back."""
    monkeypatch.setattr(adoption, "MEANS", ())
    model: Any = random_model(family)
    found = list(adoption.found_experts(model))
    dense = weight_quantization.bytes_in(model)
    weight_quantization.apply(model, format, packer(CPU), with_experts=True)
    assert weight_quantization.bytes_in(model) < dense / 2
    assert adoption.adopt(model).startswith(f"{len(found)} mixtures over codes, ")
    assert all(isinstance(stack, RowStack) for mixture in found for stack in experts.stacks_of(mixture))
    for mixture in found:
        width = experts.stacks_of(mixture)[0].k
        x, chosen, shares = (
            torch.randn(5, width),
            torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0], [0, 1]]),
            torch.rand(5, 2),
        )
        outs = []
        for on in (False, True):
            modules.switch(model, on)
            assert isinstance(mixture, adoption.Experts) == on
            outs.append(mixture(x, chosen, shares))
        assert (outs[0] - outs[1]).abs().max() / outs[0].std() < 1e-4
        assert torch.equal(mixture(x[-1:], chosen[-1:], shares[-1:])[0], outs[1][-1])
        assert all(is_nothing(each) for name, each in mixture.named_parameters() if not name.endswith("_bias"))


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("another expert's scale", "MixtralExperts over codes differs from torch's by"),
        ("order", "MixtralExperts over codes gives a row other bits among"),
        ("fails", "MixtralExperts over codes fails: .*no such device"),
        ("another code", "packed as int8 differs from its codes"),
    ],
)
def test_control_codes_that_are_wrong_are_refused(what: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture does not start with them."""
    multiply = RowStack.multiply
    if what == "another expert's scale":

        def wrong(stack: RowStack, *given: Any) -> torch.Tensor:
            return multiply(replace(stack, scales=stack.scales.roll(1, 0)), *given)

        monkeypatch.setattr(RowStack, "multiply", wrong)
    elif what == "order":

        def other(stack: RowStack, x: torch.Tensor, *given: Any) -> torch.Tensor:
            return multiply(stack, x, *given) * (1 + 1e-6 * (len(x) == 1))

        monkeypatch.setattr(RowStack, "multiply", other)
    elif what == "fails":

        class Fails:
            def __getitem__(self, grid: Any) -> Any:
                raise RuntimeError("no such device\nAdvice.")

        monkeypatch.setattr(operators.kernels, "experts", Fails())
    else:
        monkeypatch.setattr(
            gpu_codes, "values_of", lambda codes, format: weight_quantization.values_of(codes.clamp(max=90), format)
        )
    monkeypatch.setattr(adoption, "MEANS", ())
    model: Any = random_model("mixtral")
    with pytest.raises(CheckpointRefused, match=why):
        weight_quantization.apply(model, "int8", packer(CPU), with_experts=True)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("another expert's", "mixtures by torch, because Triton's MixtralExperts differs from torch's by"),
        ("order", "mixtures by torch, because Triton's MixtralExperts gives a row other bits among"),
        ("fails", "mixtures by torch, because Triton's MixtralExperts fails: no such device"),
        ("router", "routers by torch, because Triton's MixtralTopKRouter differs from torch's by"),
        ("router's order", "routers by torch, because Triton's MixtralTopKRouter gives a row other bits among"),
    ],
)
def test_control_what_is_wrong_does_not_serve(
    what: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts or routers are torch's then, all of them, and the log says so; the others are served."""
    linear, total, tiling = products.linear, operators.kernels.mix, operators.tiling

    class Fails:
        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError("no such device\nAdvice.")

    def other_order(pairs: int, *more: Any) -> Tiling:
        return replace(tiling(pairs, *more), depth=16 if pairs < 30 else 32)

    if what == "another expert's":

        class Others:
            def __getitem__(self, grid: Any) -> Any:
                return lambda y, *more, **options: total[grid](y.roll(1, 0), *more, **options)

        monkeypatch.setattr(operators.kernels, "mix", Others())
    elif what == "order":
        monkeypatch.setattr(operators, "tiling", other_order)
    elif what == "fails":
        monkeypatch.setattr(operators.kernels, "experts", Fails())
    elif what == "router":
        monkeypatch.setattr(products, "linear", lambda *given, **named: linear(*given, **named) * 1.01)
    else:
        of = Tiling.of
        monkeypatch.setattr(
            products.Tiling, "of", lambda rows, n, *more: replace(of(rows, n, *more), depth=16 if rows < 5 else 32)
        )
        monkeypatch.setattr(operators, "tiling", lambda *_: Tiling(32, 32, 32, 4, 3))
    model = random_model("mixtral")
    line = adoption.adopt(model)
    assert why in line
    assert line.count("by torch") == 1
    assert "bits that may follow from a token's batch" in caplog.text
    modules.switch(model, True)
    served = [isinstance(each, adoption.Experts | adoption.Router) for each in model.modules()]
    assert sum(served) == 4  # of the other kind


@pytest.mark.parametrize(
    ("family", "gate", "weights"),
    [("qwen3-moe", ["gated"], ""), ("gpt-oss", ["clamped_gate"], ""), ("qwen3-moe", ["gated"], "int8")],
)
def test_a_mixture_is_recorded(
    family: str, gate: list[str], weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recording serves and computes what the modules do, a row has its bits in any step, and a decode step is
    not refused for capture; that nothing in it asks who was chosen is in test_cuda_experts.py, for experts in the
    model's type."""
    more = {"layer_types": ["full_attention"] * 2} if family == "gpt-oss" else {"moe_intermediate_size": 64}
    monkeypatch.setattr(adoption, "MEANS", ())
    made = make_checkpoint(tmp_path / family, f"tiny-{family}", dtype="float32", **SMALL, **more)
    model = load_model(str(made), dtype=torch.float32, device=CPU, kernels="reference")
    model.cuda_kernel = TritonAttention(model.max_model_len)
    if weights:
        weight_quantization.apply(model.module, weights, packer(CPU), with_experts=True)
    line = layers.adopt(model.module)
    assert line.startswith(layers.NAME)
    assert line.endswith(f"2 mixtures{' over codes' if weights else ''}, 2 routers")
    model.cuda_products = True
    model.use_paged_attention()
    batches = traced_forward._batches
    monkeypatch.setattr(traced_forward, "_batches", lambda model: [batches(model)[0], batches(model)[3]])
    assert traced_forward.install(model) == "recorded"
    pages = with_context(model)
    single = Batch([3, 4], [20, 5], [1, 1], [21, 6], [[4, 1], [0]], [0, 1])
    before = pages.buffer.clone()
    with monkeypatch.context() as patch, Kernels(patch) as seen:
        for name in ("plan", "experts", "clamped_gate", "mix"):
            kernel = getattr(operators.kernels, name)
            patch.setattr(operators.kernels, name, Noted(name, kernel, seen.seen))
        recorded = model.forward(pages, single)
    own = seen.seen[seen.seen.index("rms_norm", seen.seen.index("attend")) + 1 : seen.seen.index("mix")]
    assert sorted(own) == sorted([*MIXTURE, *gate])
    pages.buffer.copy_(before)
    alone = model.forward(pages, Batch([3], [20], [1], [21], [[4, 1]], [0]))
    assert torch.equal(recorded[:1], alone)
    pages.buffer.copy_(before)
    model.recorded = None
    assert (model.forward(pages, single) - recorded).abs().max() / recorded.std() < 1e-4
    assert captured_steps.unfit(model, pages) is None
