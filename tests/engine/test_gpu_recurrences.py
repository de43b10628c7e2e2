"""The recurrences of a GPU, by Triton's interpreter: numbers, and that a token's bits follow from its sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")

from triton.errors import TritonError

from engine import kernels as compiled
from engine.gpu.operators import ops
from engine.gpu.recurrent import kernels, operators  # noqa: F401  (makes the operators known)
from engine.kernels import REFERENCE
from engine.loading import state_probe
from engine.runner import recurrences
from engine.runner.mixers import Mixer
from loadtest.harness.random_checkpoints import make_checkpoint
from loadtest.microbench import machine_code
from tests.engine.conftest import two_layers

CPU = torch.device("cpu")
EXACT = 1e-5  # of the largest number
NUMBERS = torch.Generator()
Tensors = tuple[torch.Tensor, ...]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=NUMBERS)


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=NUMBERS)


@dataclass(frozen=True)
class Rule:
    """One recurrence: how its operator is called with tokens `[n, tokens, ...]`, and a state of a sequence."""

    operator: str
    tokens: Callable[[int, int], Tensors]
    constants: Callable[[], tuple[Any, ...]]
    call: Callable[[Any, Tensors, tuple[Any, ...], torch.Tensor, list[int], list[int]], torch.Tensor]
    plain: Callable[[Tensors, tuple[Any, ...], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    state: tuple[int, ...]


def delta(k_heads: int, heads: int, dk: int, dv: int, channels: bool = False) -> Rule:
    def tokens(n: int, count: int) -> Tensors:
        q, k = (F.normalize(normal(n, count, k_heads, dk), dim=-1) for _ in range(2))
        decay = uniform(n, count, heads, dk) if channels else uniform(n, count, heads)
        return q, k, normal(n, count, heads, dv), decay, uniform(n, count, heads)

    def plain(given: Tensors, _: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, decay, beta = given
        q, k = (each.repeat_interleave(heads // k_heads, 2) for each in (q, k))
        out = []
        for t in range(q.shape[1]):
            state = state * (decay[:, t, :, :, None] if channels else decay[:, t, :, None, None])
            u = beta[:, t, :, None] * (v[:, t] - torch.einsum("nhk,nhkv->nhv", k[:, t], state))
            state = state + k[:, t, :, :, None] * u[:, :, None]
            out.append(torch.einsum("nhk,nhkv->nhv", q[:, t], state))
        return torch.stack(out, 1), state

    def call(operator: Any, given: Tensors, _: Any, states: torch.Tensor, *rows: list[int]) -> torch.Tensor:
        return operator(*given, states, torch.tensor(rows))  # type: ignore[no-any-return]

    return Rule("gated_delta", tokens, tuple, call, plain, (heads, dk, dv))


def scan(heads: int, groups: int, dim: int, size: int, own: bool = False, skip: bool = True) -> Rule:
    def tokens(n: int, count: int) -> Tensors:
        dt = uniform(n, count, heads, dim) if own else uniform(n, count, heads)
        return normal(n, count, heads, dim), dt, normal(n, count, groups, size), normal(n, count, groups, size)

    def constants() -> tuple[Any, ...]:
        d = None if not skip else normal(dim) if own else normal(heads)[:, None]
        return -uniform(heads, dim, size) if own else -uniform(heads), d

    def plain(given: Tensors, fixed: tuple[Any, ...], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (x, dt, b, c), (a, d) = given, fixed
        b, c = (each.repeat_interleave(heads // groups, 2) for each in (b, c))
        a, dt = (a, dt) if own else (a[:, None, None], dt[..., None])
        out = []
        for t in range(x.shape[1]):
            state = state * (dt[:, t, ..., None] * a).exp() + (dt[:, t] * x[:, t])[..., None] * b[:, t, :, None]
            y = (state * c[:, t, :, None]).sum(-1)
            out.append(y if d is None else y + d * x[:, t])
        return torch.stack(out, 1), state

    def call(
        operator: Any, given: Tensors, fixed: tuple[Any, ...], states: torch.Tensor, *rows: list[int]
    ) -> torch.Tensor:
        (x, dt, b, c), (a, d) = given, fixed
        return operator(x, dt, a, b, c, d, states, torch.tensor(rows))  # type: ignore[no-any-return]

    return Rule("state_space_scan", tokens, constants, call, plain, (heads, dim, size))


def steps(channels: int, width: int, kept: int, bias: bool, silu: bool = True) -> Rule:
    """A convolution by single tokens."""

    def tokens(n: int, count: int) -> Tensors:
        return (normal(n, count, channels),)

    def constants() -> tuple[Any, ...]:
        return normal(width, channels).T, normal(channels) if bias else None

    def plain(given: Tensors, fixed: tuple[Any, ...], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        longer = torch.cat([state, given[0].transpose(1, 2)], -1)
        y = F.conv1d(longer, fixed[0].unsqueeze(1), fixed[1], groups=channels)[..., kept - width + 1 :]
        return (F.silu(y) if silu else y).transpose(1, 2), longer[..., -kept:]

    def call(
        operator: Any, given: Tensors, fixed: tuple[Any, ...], states: torch.Tensor, rows: list[int], to: list[int]
    ) -> torch.Tensor:
        out = []
        for t in range(given[0].shape[1]):
            numbers = torch.tensor([to if t else rows, to])
            out.append(operator(given[0][:, t].contiguous(), *fixed, silu, states, numbers))
        return torch.stack(out, 1)

    return Rule("short_convolution_step", tokens, constants, call, plain, (channels, kept))


RULES = {
    "gated delta, as Qwen3-Next": delta(1, 2, 128, 16),
    "gated delta, no powers of two": delta(1, 3, 5, 70),
    "gated delta, of a large head": delta(1, 1, 192, 9),
    "Kimi delta, no powers of two": delta(2, 2, 24, 7, channels=True),
    "Mamba-2, as Nemotron-H": scan(2, 1, 20, 128),
    "Mamba-2, as Granite, without D": scan(2, 2, 6, 64, skip=False),
    "Mamba-2, no powers of two": scan(3, 1, 5, 37),
    "Mamba": scan(1, 1, 70, 16, own=True),
    "Mamba, no powers of two, without D": scan(1, 1, 5, 11, own=True, skip=False),
    "convolution of 4 taps": steps(130, 4, 4, bias=False),
    "convolution of 3 taps with a bias": steps(7, 3, 2, bias=True),
    "convolution that keeps more than it needs": steps(5, 2, 4, bias=True, silu=False),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def made(rule: Rule, n: int, tokens: int) -> tuple[Tensors, tuple[Any, ...], torch.Tensor]:
    """Tokens, constants, and five rows of states, in memory with something between them."""
    NUMBERS.manual_seed(7)
    given, fixed = rule.tokens(n, tokens), rule.constants()
    size = normal(*rule.state).numel()
    rows = normal(5, size + 3)[:, :size]
    return given, fixed, rows.as_strided((5, *rule.state), (size + 3, *torch.empty(rule.state).stride()))


def copy(states: torch.Tensor) -> torch.Tensor:
    """With the same strides."""
    new = torch.empty(states.stride(0) * len(states)).as_strided(states.shape, states.stride())
    return new.copy_(states)


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def doubled(given: tuple[Any, ...]) -> Any:
    return tuple(None if each is None else each.double() for each in given)


@every_rule
def test_it_computes_its_formula_and_what_the_operator_for_cpu_computes(rule: Rule) -> None:
    """From a state and from zeros; rows lie anywhere, are read where they are, and only those are written that shall
    be. What is in a row that is not read, not even a number, does not matter."""
    given, fixed, states = made(rule, 2, 3)
    states[4] = torch.nan
    before = copy(states)
    found = rule.call(getattr(ops, rule.operator), given, fixed, states, [3, -1], [0, 4])
    expected = rule.plain(doubled(given), doubled(fixed), torch.stack([before[3], torch.zeros(rule.state)]).double())
    assert off(found, expected[0]) < EXACT
    assert off(states[[0, 4]], expected[1]) < EXACT
    assert torch.equal(states[1:4], before[1:4])
    if compiled.serving(CPU) != REFERENCE:
        theirs = rule.call(getattr(torch.ops.tandem, rule.operator), given, fixed, before, [3, -1], [0, 4])
        assert off(found, theirs) < EXACT
        assert off(states[[0, 4]], before[[0, 4]]) < EXACT


def in_pieces(rule: Rule, given: Tensors, fixed: tuple[Any, ...], states: torch.Tensor, cut: int) -> torch.Tensor:
    """Of one sequence, from row 3, whose state goes from row 1 to row 2 and back, as a slot's rows change places; the
    last is in row 1."""
    out, having = [], 3
    for start in range(0, given[0].shape[1], cut):
        part = tuple(each[:, start : start + cut].contiguous() for each in given)
        into = 2 if having == 1 else 1
        out.append(rule.call(getattr(ops, rule.operator), part, fixed, states, [having], [into]))
        having = into
    states[1] = states[having].clone()
    return torch.cat(out, 1)


@every_rule
def test_a_token_has_the_same_bits_in_any_piece_and_in_any_company(rule: Rule) -> None:
    """Beside another sequence, alone, one by one and in pieces of two, in memory that begins at an odd place: token by
    token and in the state that is left, bit for bit."""
    given, fixed, states = made(rule, 2, 5)
    begun = copy(states)
    together = rule.call(getattr(ops, rule.operator), given, fixed, states, [-1, 3], [2, 4])
    alone = tuple(torch.cat([each.new_zeros(1), each[1:].flatten()])[1:].view_as(each[1:]) for each in given)
    for cut in (5, 2, 1):
        own = copy(begun)
        assert torch.equal(in_pieces(rule, alone, fixed, own, cut), together[1:]), cut
        assert torch.equal(own[1], states[4]), cut


@every_rule
def test_control_a_state_one_token_early_is_noticed(rule: Rule) -> None:
    """A piece that goes on from the state before its last token: neither bits nor numbers are right."""
    given, fixed, states = made(rule, 1, 4)
    operator = getattr(ops, rule.operator)
    whole = rule.call(operator, given, fixed, copy(states), [3], [0])
    early = tuple(each[:, :2].contiguous() for each in given)
    rule.call(operator, early, fixed, states, [3], [1])
    found = rule.call(operator, tuple(each[:, 3:].contiguous() for each in given), fixed, states, [1], [2])
    assert off(found, whole[:, 3:]) > 100 * EXACT


def test_control_by_transformers_a_chunk_has_other_bits_than_single_tokens() -> None:
    """What one order of sums is for."""
    given, _, states = made(delta(2, 2, 16, 16), 1, 5)
    q, k, v, decay, beta = given
    options: dict[str, Any] = {"initial_state": states[:1], "output_final_state": True}
    whole, _ = torch_chunk_gated_delta_rule(q, k, v, g=decay.log(), beta=beta, **options)
    _, after = torch_chunk_gated_delta_rule(
        q[:, :4], k[:, :4], v[:, :4], g=decay[:, :4].log(), beta=beta[:, :4], **options
    )
    last, _ = torch_chunk_gated_delta_rule(
        q[:, 4:], k[:, 4:], v[:, 4:], g=decay[:, 4:].log(), beta=beta[:, 4:], **options | {"initial_state": after}
    )
    assert off(last, whole[:, 4:]) < EXACT
    assert not torch.equal(last, whole[:, 4:])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [3, 4])
def test_a_convolution_of_many_tokens_has_the_bits_of_single_ones(width: int, bias: bool) -> None:
    """Of the first tokens, too, before which there are none; from rows that are parts of a projection."""
    NUMBERS.manual_seed(width)
    x = normal(2, 7, 200)[:, :, 5:140]
    weight, added = normal(135, width), normal(135) if bias else None
    found = ops.short_convolution(x, weight, added, True)
    expected = F.silu(F.conv1d(F.pad(x.transpose(1, 2), (width - 1, 0)), weight.unsqueeze(1), added, groups=135))
    assert off(found, expected.transpose(1, 2)) < EXACT
    states = torch.full((3, 135, width), torch.nan)
    rows = torch.tensor([[-1, -1], [2, 0]])
    for t in range(7):
        single = ops.short_convolution_step(x[:, t].contiguous(), weight, added, True, states, rows)
        assert torch.equal(single, found[:, t]), t
        rows[0] = rows[1]
    assert torch.equal(states[[2, 0]], x[:, -width:].transpose(1, 2))
    assert not torch.equal(ops.short_convolution(x[:, 1:], weight, added, True)[:, 0], found[:, 1])  # the control


def test_a_convolution_in_sixteen_bits_rounds_its_sum_and_its_activation() -> None:
    """float16: the interpreter does not round to bfloat16."""
    NUMBERS.manual_seed(0)
    x, weight = normal(1, 9, 64).half(), normal(64, 4).half()
    sums = F.conv1d(F.pad(x.double().transpose(1, 2), (3, 0)), weight.double().unsqueeze(1), groups=64)
    expected = F.silu(sums.half().double()).half().transpose(1, 2)
    found = ops.short_convolution(x, weight, None, True)
    assert (found != expected).float().mean() < 0.02  # sums near the border of two numbers
    assert (found.double() - expected.double()).abs().max() < 0.01
    states = torch.zeros(1, 64, 4, dtype=torch.float16)
    rows = torch.zeros(2, 1, dtype=torch.int64)
    single = [ops.short_convolution_step(x[:, t], weight, None, True, states, rows) for t in range(9)]
    assert torch.equal(torch.stack(single, 1), found)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"q": torch.zeros(1, 2, 1, 4).double()}, "contiguous float32"),
        ({"k": torch.zeros(1, 2, 1, 5)}, "unlike shapes"),
        ({"v": torch.zeros(1, 3, 2, 3)}, "other tokens"),
        ({"beta": torch.zeros(1, 2, 1)}, "beta of another shape"),
        ({"decay": torch.zeros(1, 2, 2, 3)}, "decay of another shape"),
        ({"states": torch.zeros(2, 2, 4, 4)}, "states of another shape"),
        ({"states": torch.zeros(2, 2, 3, 4).transpose(2, 3)}, "a row of states is contiguous"),
        ({"states": torch.zeros(2, 2, 4, 3).half()}, "states of another type"),
        ({"rows": torch.zeros(2, 2, dtype=torch.int64)}, "one row each"),
        ({"rows": torch.zeros(2, 1, dtype=torch.int32)}, "one row each"),
        ({"rows": torch.zeros(2, 1, dtype=torch.int64, device="meta")}, "on another device"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, Any], why: str) -> None:
    """Before a kernel reads what is not there."""
    given = {name: torch.zeros(1, 2, 1, 4) for name in ("q", "k")}
    given |= {"v": torch.zeros(1, 2, 2, 3), "decay": torch.zeros(1, 2, 2), "beta": torch.zeros(1, 2, 2)}
    rest: dict[str, Any] = {"states": torch.zeros(2, 2, 4, 3), "rows": torch.tensor([[1], [0]])}
    assert not ops.gated_delta(**given, **rest).any()
    with pytest.raises(AssertionError, match=why):
        ops.gated_delta(**{**given, **rest, **change})


def test_they_serve_where_the_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's on CUDA, where Triton is installed."""
    here: Any = SimpleNamespace(is_cuda=True)
    assert recurrences.available(torch.device("cuda"))
    assert recurrences._operators(here).gated_delta is ops.gated_delta
    assert recurrences._operators(torch.zeros(1)) is torch.ops.tandem
    assert recurrences.available(CPU) == (compiled.serving(CPU) != REFERENCE)
    monkeypatch.setattr(recurrences.importlib.util, "find_spec", lambda name: None)
    assert not recurrences.available(torch.device("cuda"))


@pytest.mark.parametrize("name", ["gated_delta", "state_space_scan", "short_convolution", "short_convolution_step"])
def test_an_operator_is_one_launch_over_tensors_of_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that torch only pretends to have. Nothing is copied there, so that a step of them can be captured."""
    given: list[Any] = []

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            assert all(size > 0 for size in grid)
            return lambda *each, **_: given.extend(each)

    def copied(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("the host makes a tensor")

    monkeypatch.setattr(kernels, name, Launch())
    monkeypatch.setattr(torch, "tensor", copied)
    with FakeTensorMode():

        def on(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device="cuda:0")

        rows = torch.empty(2, 2, dtype=torch.int64, device="cuda:0")
        calls: dict[str, list[Any]] = {
            "gated_delta": [*[on(2, 3, 1, 8)] * 2, on(2, 3, 2, 5), on(2, 3, 2), on(2, 3, 2), on(4, 2, 8, 5), rows],
            "state_space_scan": [
                *(on(2, 3, 2, 5), on(2, 3, 2), on(2), on(2, 3, 1, 8), on(2, 3, 1, 8)),
                *(on(2, 1), on(4, 2, 5, 8), rows),
            ],
            "short_convolution": [on(2, 3, 8), on(8, 4), on(8), True],
            "short_convolution_step": [on(2, 8), on(8, 4), on(8), True, on(4, 8, 4), rows],
        }
        out = getattr(ops, name)(*calls[name])
    assert {each.device for each in (out, *given) if isinstance(each, torch.Tensor)} == {torch.device("cuda", 0)}
    assert sum(each is out for each in given) == 1


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is as one on CUDA. The proof has fewer tokens, for the interpreter takes its time."""
    monkeypatch.setattr(recurrences, "_operators", lambda like: ops)
    monkeypatch.setattr(state_probe, "PIECES", (2, 1, 2))


def learnt(folder: Path) -> list[Mixer]:
    """The recurrent layers of a checkpoint, as they are served."""
    auto: Any = AutoModelForCausalLM  # transformers' factories are not typed
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    mixers = state_probe.learn(model, compiled=True)
    assert mixers is not None
    return mixers.each


def by_operators(mixer: Mixer) -> bool:
    return mixer.forward is not type(mixer.module).forward


@pytest.mark.parametrize("family", ["qwen3-next", "kimi-linear"])  # the others in test_gpu_captured_recurrences.py
def test_the_layers_of_a_model_take_them(family: str, on_gpu: None, tmp_path: Path) -> None:
    """The proof at load compares each layer with transformers' own code, in pieces that follow from a state, and its
    bits in pieces, at once and beside another sequence: with the products of a CPU they are the same."""
    shape = f"tiny-{family}"
    mixers = learnt(make_checkpoint(tmp_path, shape, dtype="float32", **two_layers(shape)))
    assert all(map(by_operators, mixers))
    assert all(mixer.exact for mixer in mixers) == (compiled.serving(CPU) != REFERENCE)


def test_layers_keep_the_code_of_transformers_where_a_kernel_is_wrong_or_fails(
    on_gpu: None, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that is not read, and a kernel that does not compile on this device."""
    rows = recurrences._rows

    def unread(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        states, numbers = rows(*given)
        return states, torch.stack([numbers[0] * 0 - 1, numbers[1]])

    with monkeypatch.context() as patch:
        patch.setattr(recurrences, "_rows", unread)
        assert not any(map(by_operators, learnt(checkpoint("tiny-qwen3-next"))))

    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            raise TritonError("out of resources")

    monkeypatch.setattr(kernels, "gated_delta", Broken())
    with pytest.raises(RuntimeError, match="tandem_gpu::gated_delta: out of resources"):
        delta(1, 1, 4, 4).call(ops.gated_delta, *made(delta(1, 1, 4, 4), 1, 1), [0], [0])
    assert not any(map(by_operators, learnt(checkpoint("tiny-qwen3-next"))))


def test_control_a_kernel_that_would_be_compiled_for_where_its_inputs_begin_is_found() -> None:
    """Its sums could have another order in another step."""
    parameters = [SimpleNamespace(name=name, do_not_specialize=name != "v") for name in ("q", "v", "tokens")]
    kernel = SimpleNamespace(params=parameters, __name__="gated_delta")
    with pytest.raises(SystemExit, match="begin elsewhere: v is specialised"):
        machine_code.recurrent("gated delta", kernel, {}, {"q": "*fp32", "v": "*fp32"}, 90, 1)
