"""Decode steps of fixed shapes, captured on CPU. CUDA graphs run on a device alone; what is around them runs here."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import kernels
from engine.attention import paged
from engine.attention.forward_context import Batch, Step
from engine.core.engine_config import EngineConfig
from engine.core.sequence import Sequence
from engine.decoding.speculative import Ngram, Speculation
from engine.engine import Engine
from engine.kv.kv_cache import KvCache
from engine.kv.kv_cache_spec import CallFacts
from engine.loading.model_loader import load_model
from engine.runner import capture_check, captured_steps
from engine.runner.captured_steps import Call, Decode, Uncapturable, buckets, operators
from engine.runner.model_runner import KvDtype, ModelRunner
from loadtest.harness.random_checkpoints import TINY
from tandem.sampling import Sampling
from tests.engine.stand_ins import Asked, Kernel, Streams

CPU = torch.device("cpu")
BLOCKS, BLOCK_SIZE, LONGEST, MOST = 24, 4, 30, 6
SPARE = BLOCKS

pytestmark = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)


def plain(call: Call) -> Call:
    """Replaces a CUDA graph."""
    return call


CAPTURES = pytest.mark.parametrize("capture", [plain, operators])


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> ModelRunner:
    return load_model(str(checkpoint("tiny-qwen3-sliding")), dtype=request.param, device=CPU, max_model_len=LONGEST)


@pytest.fixture
def pages(model: ModelRunner) -> KvCache:
    """Room for three sequences of the longest length, and the spare block."""
    return model.allocate(BLOCKS + 1, BLOCK_SIZE)


def made(model: ModelRunner, pages: KvCache, capture: captured_steps.Capture = plain) -> Decode:
    return Decode(model, pages, spare=SPARE, max_running=MOST, capture=capture)


def noise(pages: KvCache) -> None:
    """Random KV in every slot."""
    for call in range(len(pages.layout.calls)):
        for view in (pages.k[call], pages.v[call]):
            view.normal_(generator=torch.Generator().manual_seed(call))


def singles(rng: random.Random, rows: int) -> Batch:
    """One token for each of `rows` sequences, over blocks in random order."""
    positions = [rng.randrange(LONGEST if rows <= 3 else 4 * BLOCK_SIZE) for _ in range(rows)]
    free = rng.sample(range(BLOCKS), BLOCKS)
    tables = [[free.pop() for _ in range(position // BLOCK_SIZE + 1)] for position in positions]
    ids = [rng.randrange(384) for _ in range(rows)]
    return Batch(ids, positions, [1] * rows, [p + 1 for p in positions], tables, list(range(rows)))


def check_same_bits(decode: Decode, model: ModelRunner, pages: KvCache, batch: Batch) -> None:
    """Logits and pages are those of the unpadded step, which leaves the spare block as it was."""
    before = pages.buffer.clone()
    expected = model.forward(pages, batch)
    left = pages.buffer.clone()
    pages.buffer.copy_(before)
    found = decode.logits(batch)
    assert found is not None
    assert torch.equal(found, expected)
    assert torch.equal(pages.buffer[:SPARE], left[:SPARE])
    assert torch.equal(left[SPARE], before[SPARE])


def test_buckets_are_powers_of_two_and_the_most() -> None:
    """Every number of sequences has a bucket at most twice as large."""
    assert buckets(1) == [1]
    assert buckets(2) == [1, 2]
    assert buckets(6) == [1, 2, 4, 6]
    assert buckets(64) == [1, 2, 4, 8, 16, 32, 64]


@CAPTURES
def test_padding_changes_no_bit(capture: captured_steps.Capture, model: ModelRunner, pages: KvCache) -> None:
    """Any number of sequences after any other: the logits and the pages of the unpadded step, bit for bit; blocks that
    are not in the batch, and slots of unused rows, stay unchanged."""
    decode, rng = made(model, pages, capture), random.Random(0)
    noise(pages)
    assert decode.sizes == (1, 2, 4, 6)
    for rows in (3, 1, 6, 5, 2, 4, 1, 6, 3, 2, 5, 1):
        batch = singles(rng, rows)
        check_same_bits(decode, model, pages, batch)


def test_rows_left_over_see_the_spare_block_alone(model: ModelRunner, pages: KvCache) -> None:
    """Nothing of an earlier step is left in them, nor past the end of a table."""
    decode, rng = made(model, pages), random.Random(5)
    bucket = decode._buckets[-1]
    for rows in (6, 5, 6, 5):
        batch = singles(rng, rows)
        decode.logits(batch)
        step = bucket._step
        for row, table in enumerate(step.block_table.tolist()):
            own = batch.block_tables[row] if row < rows else []
            assert table == own + [SPARE] * (len(table) - len(own))
        assert step.seqused_k.tolist() == batch.context_lens + [1] * (6 - rows)
        assert step.slot_block.tolist()[rows:] == [SPARE] * (6 - rows)
        assert step.slot_offset.tolist()[rows:] == step.input_ids[0].tolist()[rows:] == [0] * (6 - rows)


def test_the_check_of_a_step_keeps_no_copy_of_random_kv(
    model: ModelRunner, pages: KvCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU no memory is set aside for one, beside a pool that has taken what is free. On CPU there is one copy for
    each step, of what the uncaptured step wrote: all bits are compared."""
    copied: list[torch.dtype] = []
    clone = torch.Tensor.clone

    def noted(each: torch.Tensor, **how: Any) -> torch.Tensor:
        copied.append(each.dtype)
        return clone(each, **how)

    monkeypatch.setattr(torch.Tensor, "clone", noted)
    decode = made(model, pages)
    assert copied.count(pages.buffer.dtype) == len(decode.sizes)


@CAPTURES
def test_the_spare_block_reaches_nobody(capture: captured_steps.Capture, model: ModelRunner, pages: KvCache) -> None:
    """Whatever it holds, including NaN, and whatever the padding rows compute from it."""
    decode, batch = made(model, pages, capture), singles(random.Random(1), 3)
    noise(pages)
    before = pages.buffer.clone()
    expected = model.forward(pages, batch)
    pages.buffer.copy_(before)
    pages.buffer.view(model.dtype)[SPARE] = torch.nan
    found = decode.logits(batch)
    assert found is not None
    assert torch.equal(found, expected)


def test_a_table_with_the_spare_block_is_refused(model: ModelRunner, pages: KvCache) -> None:
    """No sequence owns it: a batch that contains it is our own bug."""
    decode, batch = made(model, pages), singles(random.Random(2), 1)
    batch.block_tables[0][0] = SPARE
    with pytest.raises(AssertionError, match="outside"):
        decode.logits(batch)


@CAPTURES
def test_a_table_that_grew_in_place_is_seen(
    capture: captured_steps.Capture, model: ModelRunner, pages: KvCache
) -> None:
    """The pool returns its own lists: a sequence's next block is appended to the same list."""
    decode = made(model, pages, capture)
    noise(pages)
    table: list[int] = []
    for position in range(3 * BLOCK_SIZE):
        if position % BLOCK_SIZE == 0:
            table.append(20 - position)
        batch = Batch([position], [position], [1], [position + 1], [table], [0])
        before = pages.buffer.clone()
        expected = model.forward(pages, batch)
        pages.buffer.copy_(before)
        found = decode.logits(batch)
        assert found is not None
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "batch",
    [
        Batch([1, 2], [0, 1], [2], [2], [[0]], [1]),  # a prompt
        Batch([1, 2, 3], [0, 1, 0], [2, 1], [2, 1], [[0], [1]], [1, 2]),  # a prompt alongside a stream
        Batch([1, 2, 3], [0, 1, 2], [3], [3], [[0]], [0, 1, 2]),  # drafts
        Batch([1, 2], [0, 0], [1, 1], [1, 1], [[0], [1]], [1]),  # one row without logits
        Batch([1, 2], [0, 0], [1, 1], [1, 1], [[0], [1]], [1, 0]),
        Batch([1] * 7, [0] * 7, [1] * 7, [1] * 7, [[block] for block in range(7)], list(range(7))),  # too many
        Batch([1], [0], [1], [1], [list(range(9))], [0]),  # a table longer than any sequence
        Batch([1], [0], [1], [1], [[0]], [0], adapters=[0]),
    ],
)
def test_other_steps_take_the_models_forward(batch: Batch, model: ModelRunner, pages: KvCache) -> None:
    """A step that is not one of single tokens, or does not fit, is declined with nothing written."""
    decode = made(model, pages)
    before = pages.buffer.clone()
    assert decode.logits(batch) is None
    assert torch.equal(pages.buffer, before)


def test_no_recorded_step_reads_the_host(model: ModelRunner, pages: KvCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bucket is recorded once, before traffic, over the tensors that later steps fill."""
    calls: list[Call] = []

    def counted(call: Call) -> Call:
        calls.append(call)
        return call

    decode = made(model, pages, counted)
    assert len(calls) == len(decode.sizes)
    before = [bucket._device.data_ptr() for bucket in decode._buckets]
    for rows in (1, 6, 2):
        decode.logits(singles(random.Random(rows), rows))
    assert len(calls) == len(decode.sizes)
    assert [bucket._device.data_ptr() for bucket in decode._buckets] == before


def frozen(call: Call) -> Call:
    """A recording with the first batch's result as a constant."""
    first = call().clone()
    return lambda: first


def halting(call: Call) -> Call:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(("capture", "why"), [(frozen, "differs from the step itself"), (halting, "not permitted")])
def test_a_recording_that_is_wrong_or_fails_does_not_serve(
    capture: captured_steps.Capture, why: str, model: ModelRunner, pages: KvCache
) -> None:
    """It is compared with the step over another batch than the recorded one; the reason is reported."""
    with pytest.raises(Uncapturable, match=why):
        made(model, pages, capture)


def test_control_a_capture_that_writes_no_kv_does_not_serve(model: ModelRunner, pages: KvCache) -> None:
    """What the uncaptured step wrote is gone before the captured one runs."""

    def forgetful(call: Call) -> Call:
        def replay() -> torch.Tensor:
            before = pages.buffer.clone()
            logits = call()
            pages.buffer.copy_(before)
            return logits

        return replay

    with pytest.raises(Uncapturable, match="differs from the step itself"):
        made(model, pages, forgetful)


def test_what_plans_on_the_host_is_not_captured(checkpoint: Callable[[str], Path]) -> None:
    """Latent pages and the reference path read lists of the batch; if one slips through, reading them fails."""
    latent = load_model(str(checkpoint("tiny-deepseek-v3")), dtype=torch.float32, device=CPU, max_model_len=LONGEST)
    with pytest.raises(Uncapturable, match="latent"):
        made(latent, latent.allocate(BLOCKS + 1, BLOCK_SIZE))
    by_reference = load_model(
        str(checkpoint("tiny-llama")), dtype=torch.float32, device=CPU, max_model_len=LONGEST, kernels="reference"
    )
    pages = by_reference.allocate(BLOCKS + 1, BLOCK_SIZE)
    with pytest.raises(Uncapturable, match="reference"):
        made(by_reference, pages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured_steps, "unfit", lambda model, pages: None)
        with pytest.raises(Uncapturable, match="batch"):
            made(by_reference, pages)


def test_a_cuda_kernel_serves_captured_steps(checkpoint: Callable[[str], Path]) -> None:
    """As on CUDA: no compiled operators, attention by a kernel with the static tensors as its arguments."""
    path = str(checkpoint("tiny-qwen3-sliding"))
    model = load_model(path, dtype=torch.bfloat16, device=CPU, max_model_len=LONGEST, kernels="reference")
    model.cuda_kernel = Kernel()
    pages = model.allocate(BLOCKS + 1, BLOCK_SIZE)
    decode, rng = made(model, pages), random.Random(3)
    noise(pages)
    for rows in (3, 1, 5):
        batch = singles(rng, rows)
        before = pages.buffer.clone()
        expected = model.forward(pages, batch)
        pages.buffer.copy_(before)
        found = decode.logits(batch)
        assert found is not None
        gap = ((found - expected).abs().amax(-1) / expected.std(-1)).max()
        assert gap < 0.3, "roundings of 16 bits in products of other shapes"


class Graph:
    """Stands for torch.cuda.graph, which leaves its stream only where the capture can be ended."""

    def __init__(self, _graph: Any, *, stream: object, **_: Any) -> None:
        self.inside: Any = torch.cuda.stream(stream)  # type: ignore[arg-type]

    def __enter__(self) -> None:
        self.inside.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.inside.__exit__(None, None, None)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams(monkeypatch)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    return made


def test_after_a_capture_that_fails_steps_run_where_they_did(streams: Streams) -> None:
    """Not on the stream of the capture, for which nothing else waits."""

    def waits() -> torch.Tensor:
        if len(calls) == captured_steps.WARM_UP:
            raise RuntimeError("operation not permitted when stream is capturing")
        calls.append(streams.current)
        return torch.zeros(1)

    calls: list[object] = []
    capture = captured_steps.cuda_graphs()
    with pytest.raises(RuntimeError):
        capture(waits)
    assert None not in calls
    assert streams.current is None


def test_graphs_are_captured_on_one_stream(streams: Streams) -> None:
    """torch reuses memory only on the stream for which it was allocated, in a pool of graphs as well. With a stream of
    its own, each graph would keep the memory of all its tensors."""
    seen: list[object] = []

    def call() -> torch.Tensor:
        seen.append(streams.current)
        return torch.zeros(1)

    capture = captured_steps.cuda_graphs()
    for _ in range(2):
        capture(call)
    assert len(seen) == 2 * (captured_steps.WARM_UP + 1)
    assert None not in seen
    assert len(set(map(id, seen))) == 1


def test_random_quantised_kv_is_made_on_the_device_of_its_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses a generator of another device, and no model with quantised KV would be captured on CUDA."""
    asked: list[Any] = []
    randn = torch.randn

    def made(shape: Any, *, generator: Any, device: Any = None) -> torch.Tensor:
        asked.append((generator.device, device))
        return randn(shape)

    monkeypatch.setattr(torch, "randn", made)
    gpu: Any = SimpleNamespace(device=torch.device("cuda", 0))
    capture_check._randomise(torch.zeros(1, 2, 2, 8, dtype=torch.int8), torch.zeros(1, 2, 2), gpu)
    assert asked == [(gpu.device, gpu.device)]


class Nothing:
    """A kernel that serves every attention call and computes nothing; quantised pages are written by plain PyTorch."""

    name = "nothing"

    def refusal(self, facts: CallFacts, dtype: torch.dtype) -> str | None:
        return "latent pages" if facts.latent else None

    def attend(self, query: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        facts = next(one for one in given if isinstance(one, CallFacts))
        return query.new_zeros(*query.shape[:2], facts.v_dim)

    def write_quantised(self, pages: torch.Tensor, scales: torch.Tensor, new: torch.Tensor, step: Step) -> None:
        places = {"slot_block": step.slot_block, "slot_offset": step.slot_offset}
        plain: Any = SimpleNamespace(**places, compiled=False, cuda_kernel=None)
        paged.write(pages, scales, new, plain)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
def test_a_step_with_quantised_kv_asks_the_device_for_nothing(
    family: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does writing it."""
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)
    model = load_model(
        str(checkpoint(f"tiny-{family}")),
        dtype=torch.bfloat16,
        device=CPU,
        max_model_len=LONGEST,
        kernels="reference",
        kv_dtype="int8",
    )
    model.cuda_kernel = Nothing()
    pages = model.allocate(BLOCKS + 1, BLOCK_SIZE)
    assert captured_steps.unfit(model, pages) is None
    step, wanted = captured_steps._Static(model, pages, 4, SPARE), torch.arange(4)
    with Asked() as asked:
        model.run(step, wanted)
    assert asked.names == []


SERVED = [
    *("gemma2", "gemma3-text", "gpt-oss", "gpt2", "llama", "llama4-text", "mistral", "mixtral", "olmo2", "opt"),
    *("phi3", "qwen2", "qwen2-moe", "qwen2-moe-sliding", "qwen2-sliding", "qwen3", "qwen3-moe", "qwen3-sliding"),
]


@pytest.mark.parametrize("family", sorted(TINY))
def test_a_recorded_step_asks_the_device_for_nothing(
    family: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward neither waits for a value nor copies one from the host, so that it can be captured."""
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # in inference mode the watch does not see `item`
    path = str(checkpoint(f"tiny-{family}"))
    model = load_model(path, dtype=torch.bfloat16, device=CPU, max_model_len=LONGEST, kernels="reference")
    model.cuda_kernel = Nothing()
    pages = model.allocate(BLOCKS + 1, BLOCK_SIZE)
    assert (captured_steps.unfit(model, pages) is None) == (family in SERVED)
    if family not in SERVED:
        return
    step, wanted = captured_steps._Static(model, pages, 4, SPARE), torch.arange(4)
    with Asked() as asked:
        model.run(step, wanted)
    assert asked.names == []
    step.begin()
    model.module.get_input_embeddings().register_forward_hook(lambda _module, _ids, out: out * out.sum().item())
    with Asked() as asked:
        model.run(step, wanted)
    assert asked.names == ["aten._local_scalar_dense.default"], "the watch sees what it is there to see"


# ---- captured on CPU


COUNTED_BY_TYPE = {("olmo2", torch.float32), ("olmo2", torch.bfloat16)}
COUNTING = {("olmo2", torch.bfloat16)}  # its recording is the unfused one, which takes sizes through tensors
IN_TURN = [(family, (torch.float32, torch.bfloat16)[place % 2]) for place, family in enumerate(sorted(TINY))]


@pytest.mark.parametrize(("family", "dtype"), sorted({*IN_TURN, *COUNTED_BY_TYPE}, key=str))
def test_every_family_is_captured_on_cpu_with_the_same_bits(
    family: str, dtype: torch.dtype, checkpoint: Callable[[str], Path]
) -> None:
    """Several consecutive steps, of any number of rows. Steps that plan on the host are refused."""
    model = load_model(str(checkpoint(f"tiny-{family}")), dtype=dtype, device=CPU, max_model_len=LONGEST)
    pages = model.allocate(BLOCKS + 1, BLOCK_SIZE)
    if model.latent or (family, dtype) in COUNTING:
        with pytest.raises(Uncapturable, match=r"latent|a number is taken"):
            Decode(model, pages, spare=SPARE, max_running=MOST, capture=None)
        return
    decode, rng = Decode(model, pages, spare=SPARE, max_running=MOST, capture=None), random.Random(0)
    noise(pages)
    for rows in (3, 1, 6, 5):
        batch = singles(rng, rows)
        check_same_bits(decode, model, pages, batch)


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_quantised_kv_is_captured_on_cpu(kv: KvDtype, checkpoint: Callable[[str], Path]) -> None:
    """Elements and scales are written and read as without a capture, token by token."""
    path = str(checkpoint("tiny-llama"))
    model = load_model(path, dtype=torch.bfloat16, device=CPU, max_model_len=LONGEST, kv_dtype=kv)
    pages = model.allocate(BLOCKS + 1, BLOCK_SIZE)
    decode = Decode(model, pages, spare=SPARE, max_running=MOST, capture=None)
    for position in range(9):
        batch = Batch([position + 1], [position], [1], [position + 1], [[7, 3, 5]], [0])
        found = decode.logits(batch)
        left = pages.buffer.clone()
        assert found is not None
        assert torch.equal(found, model.forward(pages, batch))
        assert torch.equal(pages.buffer, left)


def test_a_step_after_the_captured_one_shares_no_memory_with_what_is_still_needed() -> None:
    """Intermediate tensors share one buffer, whose memory is reused; results keep theirs."""
    x = torch.randn(4, 64)

    def call() -> torch.Tensor:
        total = x * 1
        for number in range(20):
            total = total + (x * number).exp().sin()
        return total

    with torch.inference_mode():
        step = torch.classes.tandem.CapturedStep()
        step.begin()
        out = call()
        step.end([out])
        assert torch.equal(out, call())
        assert step.memory() < 6 * x.nbytes, "20 times 3 intermediate tensors, of which few live at a time"
        x.normal_()
        stale = out.clone()
        step.replay()
        assert torch.equal(out, call())
        assert not torch.equal(out, stale), "the control: without a replay it has the old values"


@pytest.mark.parametrize("name", ["exp", "silu", "sigmoid", "softplus", "cos", "tanh", "softmax", "mean", "rsqrt"])
def test_a_replay_has_the_bits_of_a_step(name: str) -> None:
    """Also where a step has a function of its own in place of torch's (engine/kernels/invariant.cpp), which writes into
    no given result. Of as many elements as torch computes by two functions."""
    function = getattr(torch, name, None) or getattr(torch.nn.functional, name)
    kwargs = {"dim": -1} if name in ("softmax", "mean") else {}
    x = torch.rand(8, 61)
    with torch.inference_mode(), kernels.exact(torch.device("cpu")):
        replay = operators(lambda: function(x * 3, **kwargs) * 1)
        x.uniform_()
        assert torch.equal(replay(), function(x * 3, **kwargs))


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda x: x * x.sum().item(), "a number is taken out of a tensor"),
        (lambda x: x * bool((x > 0).any()), "a number is taken out of a tensor"),
        (lambda x: x[x > 0], "aten::index has a result that depends"),
        (lambda x: x.nonzero(), "aten::nonzero has a result that depends"),
        (lambda x: torch.rand_like(x), "aten::rand_like has a result that depends"),
        (lambda x: x[torch.tensor([1, 3])], "a tensor that the host has filled"),
    ],
)
def test_a_step_that_a_replay_could_not_know_is_refused(step: Callable[[torch.Tensor], torch.Tensor], why: str) -> None:
    """Afterwards the thread's operators are restored. Control: a step that can be replayed."""
    x, rows = torch.randn(5), torch.tensor([1, 3])
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match=why):
            operators(lambda: step(x))
        known = operators(lambda: x[rows] * 2)
        x.normal_()
        assert torch.equal(known(), x[[1, 3]] * 2)


def test_what_an_operator_returns_of_its_arguments_stays_where_it_is() -> None:
    """An operator that returns an argument along with new memory: the argument is not the capture's to move."""
    library = torch.library.Library("tandem_test", "DEF")
    library.define("both(Tensor(a) x) -> (Tensor(a), Tensor)")
    library.impl("both", lambda x: (x.view(-1), x * 2), "CPU")
    x = torch.randn(3, 4)
    address = x.data_ptr()
    with torch.inference_mode():
        replay = operators(lambda: torch.ops.tandem_test.both(x)[1] + 1)
        x.normal_()
        assert torch.equal(replay(), x * 2 + 1)
    assert x.data_ptr() == address


def test_a_forward_by_modules_is_not_captured_on_cpu(
    model: ModelRunner, pages: KvCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python may keep a tensor that a capture would move."""
    monkeypatch.setattr(model, "recorded", None)
    with pytest.raises(Uncapturable, match="not recorded"):
        Decode(model, pages, spare=SPARE, max_running=MOST, capture=None)


def test_a_model_that_is_long_to_read_is_not_captured_on_cpu(
    model: ModelRunner, pages: KvCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture would save little of its step."""
    monkeypatch.setattr(captured_steps, "CPU_BYTES", model.step_bytes - 1)
    with pytest.raises(Uncapturable, match="would save little"):
        Decode(model, pages, spare=SPARE, max_running=MOST, capture=None)


# ---- in the engine


def tokens_of(
    model: ModelRunner, capture: captured_steps.Capture | None, speculation: bool = False
) -> tuple[list[list[int]], int]:
    """The tokens of some requests, and the number of recorded steps; the ledger balances."""
    engine = Engine(
        model,
        EngineConfig(
            num_blocks=16, block_size=BLOCK_SIZE, token_budget=16, max_running=MOST, spare_block=capture is not None
        ),
        speculation=Speculation(Ngram(), 3) if speculation else None,
    )
    if capture is not None:
        assert engine.capture(capture) == "captured for 1, 2, 4, 6 sequences"
        assert engine.pool.total == 16
    replayed = 0
    if engine.decode:
        real = engine.decode.logits

        def counted(batch: Batch) -> torch.Tensor | None:
            nonlocal replayed
            found = real(batch)
            replayed += found is not None
            return found

        engine.decode.logits = counted  # type: ignore[method-assign]
    rng = random.Random(4)
    sequences = []
    for number in range(9):
        prompt = [rng.randrange(384) for _ in range(rng.randint(1, 12))]
        how = Sampling(temperature=1.0 if number % 2 else 0.0, seed=number)
        limit = min(LONGEST, len(prompt) + rng.randint(3, 16))
        sequences.append(Sequence(f"{number}", list(prompt), len(prompt), limit, sampling=how))
    pending = list(sequences)
    while pending or engine.sequences:
        if pending and engine.steps % 2 == 0:
            engine.add(pending.pop(0))
        assert engine.step()
        engine.pool.check(engine.sequences)
        assert all(len(engine.pages.buffer) - 1 not in engine.pool.table(owner) for owner in engine.pool.owners()) or (
            engine.spare is None
        )
    return [sequence.tokens for sequence in sequences], replayed


@CAPTURES
@pytest.mark.parametrize("speculation", [False, True])
def test_the_same_tokens_with_and_without(
    capture: captured_steps.Capture, model: ModelRunner, speculation: bool
) -> None:
    """Prompts in chunks, streams that come and go, preemptions and drafts: every token is the same."""
    expected, none = tokens_of(model, None, speculation)
    found, replayed = tokens_of(model, capture, speculation)
    assert none == 0
    assert replayed > 10
    assert found == expected


def test_an_engine_whose_steps_cannot_be_captured_serves_without(checkpoint: Callable[[str], Path]) -> None:
    """It reports why and serves as before."""
    model = load_model(str(checkpoint("tiny-deepseek-v3")), dtype=torch.float32, device=CPU, max_model_len=LONGEST)
    engine = Engine(model, EngineConfig(num_blocks=8, block_size=4, token_budget=8, max_running=2, spare_block=True))
    assert engine.capture(plain) == "not captured: latent pages"
    engine.add(Sequence("one", [1, 2, 3], 3, 8))
    while engine.sequences:
        assert engine.step()
