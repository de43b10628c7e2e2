"""The GPU's measurement: its arithmetic, and that it runs to its end on a machine without one."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from engine import kernels
from engine.attention.forward_context import Batch
from engine.decoding import sampler
from engine.gpu import sampling as gpu_sampling
from engine.gpu import trial
from engine.loading import state_probe
from engine.runner import recurrences
from engine.runner.captured_steps import Decode
from loadtest.commands import main
from loadtest.harness.random_checkpoints import HYBRID, make_module
from loadtest.microbench import device, device_kernels
from loadtest.microbench.device import NO_CUDA, TINY, Floors, mixtures
from loadtest.microbench.recurrence import REST, model_of
from loadtest.scenarios import device_handoff

CPU, ROOT = torch.device("cpu"), Path(__file__).parents[2]
MIXTURE = {
    **{"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_experts": 4},
    **{"num_experts_per_tok": 2},
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, and nothing is measured."""
    assert main(["device"]) == 1
    assert capsys.readouterr() == ("", NO_CUDA + "\n")


@pytest.mark.skipif(kernels.serving(CPU) == kernels.REFERENCE, reason="plain PyTorch has no recorded steps on a CPU")
def test_all_of_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny model on the CPU goes through every part: rates, load with self-check, both kinds of steps, digests."""
    assert main(["device", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    wanted = [
        "copy",
        "product",
        "attention:",
        "self-check:",
        "step:",
        "tiny-llama:",
        "decode steps captured for (1, 2, 3)",
    ]
    wanted += [f"decode {count} x 40, {name}" for count in (1, 2, 3) for name in ("plain", "captured")]
    wanted += ["prefill 64", "block of", "measured in"]
    assert [one for one in wanted if not any(line.startswith(one) for line in lines)] == []
    assert sum("of the floor of" in line for line in lines) == 7


def test_captured_steps_hold_the_memory_of_private_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what torch keeps for the other steps."""
    segments = [{"total_size": 5, "segment_pool_id": (0, 0)}, *({"total_size": 7, "segment_pool_id": (0, 1)},) * 2]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert device._in_graphs(torch.device("cuda", 0)) == 14
    assert device._in_graphs(CPU) == 0


@pytest.mark.parametrize(
    ("shape", "parameters", "kv"), [("Qwen3-8B", 8_190_735_360, 147_456), ("Llama-3.1-8B", 8_030_261_248, 131_072)]
)
def test_the_floors_are_those_of_the_published_models(shape: str, parameters: int, kv: int) -> None:
    """Parameters as published; an embedding is looked up, so a step reads all weights but that; the head multiplies one
    row of a prompt, so the floor of a prefill is without it."""
    module = make_module(shape, torch.bfloat16, torch.device("meta"))
    config = module.config
    assert sum(each.numel() for each in module.parameters()) == parameters
    assert kv == 2 * config.num_hidden_layers * config.num_key_value_heads * 128 * 2
    table = config.vocab_size * config.hidden_size
    floors = Floors.of(module, kv)
    assert floors == Floors(weights=2 * (parameters - table), layers=parameters - 2 * table, kv=kv)
    assert floors.decode_s(64, 1024, 4e12) == (2 * (parameters - table) + 64 * 1024 * kv) / 4e12
    assert floors.prefill_s(8192, 8e14) == 2 * (parameters - 2 * table) * 8192 / 8e14


def test_tied_weights_are_read_once() -> None:
    """The one table is the head, too: it is read by every step."""
    module = make_module("SmolLM2-135M", torch.bfloat16, torch.device("meta"))
    total = sum(each.numel() for each in module.parameters())
    floors = Floors.of(module, 1)
    assert floors.weights == 2 * total
    assert floors.layers == total - 49152 * 576


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_no_kernel_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing is claimed."""
    assert main(["device-kernels"]) == 1
    assert capsys.readouterr().err.strip() == device_kernels.NO_CUDA


def test_a_name_of_no_check_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was checked, so nothing was found right."""
    assert main(["device-kernels", "--device", "cpu", "--only", "experts over codes"]) == 1
    said = capsys.readouterr()
    assert said.err.strip() == "error: no check begins with 'experts over codes'"
    assert "wrong" not in said.out


@pytest.mark.skipif(kernels.serving(CPU) == kernels.REFERENCE, reason="plain PyTorch captures no steps on a CPU")
def test_the_kernels_are_checked_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    """By the interpreter here: one kernel of the list, and a family."""
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")
    assert main(["device-kernels", "--device", "cpu", "--only", "digests"]) == 0
    assert main(["device-kernels", "--device", "cpu", "--only", "family llama4"]) == 0
    out = capsys.readouterr().out
    assert "digests: equal to numpy's" in out
    assert "family llama4-text: decode steps" in out
    assert out.count("0 wrong") == 2


def test_a_family_whose_steps_are_not_captured_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family's are, on a GPU: one that stops being captured is slow, and no number of it differs."""
    monkeypatch.setattr(device_kernels.Engine, "capture", lambda engine: "not captured: it waits")
    assert device_kernels.family(CPU, "llama", torch.float32) == "wrong: decode steps not captured: it waits"


def test_captured_steps_are_compared_of_families_of_each_kind() -> None:
    """Llama's are queued, too; Kimi-Linear has latents and states, and on an H200 its steps were not captured yet."""
    names = [name for name, _ in device_kernels.checks(CPU, ["llama", *HYBRID])]
    assert {f"streams {name}" for name in ("llama", "qwen3-5", "falcon-h1", "lfm2", "kimi-linear")} <= set(names)


def test_log_probabilities_are_checked_against_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal tokens the lowest. Control: others, and other numbers."""
    assert device_kernels.log_probabilities(CPU, 600).startswith("those of the CPU")
    found = [device_kernels.logprobs.logprobs(torch.randn(8, 600), range(8), [20] * 8) for _ in range(2)]
    for other, said in ((found[1], "likeliest"), ([one._replace(chosen=0.0) for one in found[0]], "off by")):
        both = iter((found[0], other))
        monkeypatch.setattr(device_kernels.logprobs, "logprobs", lambda *_, both=both: next(both))
        assert said in device_kernels.log_probabilities(CPU, 600)


def test_mixtures_are_checked_against_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts, over codes as well, and routers. Those that are torch's, because an operator is wrong, are reported."""
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")
    from engine.gpu.mixture import adoption

    monkeypatch.setattr(adoption, "SOME", (1, 5))
    monkeypatch.setattr(adoption, "MEANS", ())
    right = "equal within roundings, and a row to itself"
    assert device_kernels.experts(CPU, MIXTURE, torch.float32) == right
    assert device_kernels.experts(CPU, MIXTURE, torch.float32, "int8") == right
    assert device_kernels.experts(CPU, MIXTURE, torch.float32, "int4", group=64) == right
    monkeypatch.setattr(adoption, "compute", lambda module, x, chosen, shares: x * 2)
    assert device_kernels.experts(CPU, MIXTURE, torch.float32).startswith("wrong: mixtures by torch")


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_codes_whose_columns_are_in_another_order_are_checked(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a checkpoint of GPTQ loads them. Control: the input in the order of the weight."""
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")
    from engine.gpu import codes

    right = "equal within roundings, and a row to itself"
    assert device_kernels.ordered(CPU, format, 32, (40, 128)) == right
    multiply = codes.RowCodes.multiply
    monkeypatch.setattr(codes.RowCodes, "multiply", lambda own, x, bias: multiply(replace(own, order=None), x, bias))
    assert device_kernels.ordered(CPU, format, 32, (40, 128)) == "wrong: other products"


def test_codes_with_zeros_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As AWQ and GPTQ without symmetry have them. Control: a product that takes 8 for every zero."""
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")
    from engine.gpu import codes

    assert "product over int4 in groups of 128, with zeros" in dict(device_kernels.checks(CPU, []))
    monkeypatch.setattr(codes, "_proven", set())
    assert device_kernels.codes(CPU, "int4", 32, zeros=True, sizes=(40, 128)).startswith("equal within roundings")
    codes._proven.clear()
    multiply = codes.RowCodes.multiply
    monkeypatch.setattr(codes.RowCodes, "multiply", lambda own, x, bias: multiply(replace(own, zeros=None), x, bias))
    check = partial(device_kernels.codes, CPU, "int4", 32, zeros=True, sizes=(40, 128))
    assert device_kernels.found(check).startswith("wrong: CheckpointRefused: a weight of 40 x 128 packed as int4")


def test_experts_are_timed_beside_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a token, for a few and for a prompt."""
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")
    from engine.gpu.mixture import adoption

    monkeypatch.setattr(adoption, "SOME", (1, 5))
    monkeypatch.setitem(trial.GAP, torch.bfloat16, 0.2)  # the interpreter does not round
    lines: list[str] = []
    mixtures(replace(TINY, prompt=4), {"tiny": MIXTURE}, CPU, lines.append)
    assert lines[1] == "tiny: 1 mixtures, 1 routers"
    assert [line.partition(" rows")[0] for line in lines[2:]] == [f"experts, {rows}" for rows in (1, 2, 3, 4)]
    assert all("; torch's " in line for line in lines[2:])


@pytest.mark.skipif(kernels.serving(CPU) == kernels.REFERENCE, reason="plain PyTorch has no operators")
def test_recurrent_layers_are_checked_against_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer. One that keeps transformers' code, because an operator is wrong, is reported; one whose bits are
    promised, because Tandem's products serve, is wrong without them."""
    config = {**REST, **HYBRID["lfm2"], "num_hidden_layers": 4, "hidden_size": 64}
    line = device_kernels.recurrence(CPU, config)
    expected = (
        "2 recurrent layers with 2 states, 2 of them by compiled operators; the same bits in any step, with products"
    )
    assert line.startswith(f"{expected} by torch, because the device is cpu; off by 0.")
    wrong = recurrences.OPERATORS | {"causal_conv1d_fn": lambda *given, **more: given[0]}
    with monkeypatch.context() as patch:
        patch.setattr(recurrences, "OPERATORS", wrong)
        assert device_kernels.recurrence(CPU, config).startswith("wrong: 2 recurrent layers")
    clamped = {**REST, **HYBRID["nemotron-h"], "num_hidden_layers": 2, "hidden_size": 64}
    said = "; the same bits in any step; transformers clamps time steps of chunks alone, with products"
    assert said in device_kernels.recurrence(CPU, clamped)
    in_pieces = state_probe._in_pieces
    monkeypatch.setattr(
        state_probe, "_in_pieces", lambda *given, beside=False: in_pieces(*given, beside=beside) * (1 + 0.1 * beside)
    )
    unlike = device_kernels.recurrence(CPU, clamped)
    assert "; not the same bits in any step, with products" in unlike
    assert not unlike.startswith("wrong")
    monkeypatch.setattr(device_kernels.layers, "prepare", lambda *_: f"{device_kernels.layers.NAME}, 1 products")
    assert device_kernels.recurrence(CPU, clamped).startswith("wrong: ")
    mamba = {**REST, **HYBRID["jamba"], "num_hidden_layers": 2, "hidden_size": 64}
    assert not device_kernels.recurrence(CPU, mamba).startswith("wrong")


@pytest.mark.skipif(kernels.serving(CPU) == kernels.REFERENCE, reason="plain PyTorch has no operators")
def test_what_a_recurrent_layer_computes_in_16_bits_is_compared_with_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is compiled for each type, and the rest of the check is in float32. Products that Triton fails are
    wrong, too."""
    config = {**REST, **HYBRID["lfm2"], "num_hidden_layers": 4, "hidden_size": 64}
    in_pieces = state_probe._in_pieces

    def other(mixer: Any, given: Any, facts: Any, pieces: Any, dtype: torch.dtype, beside: bool = False) -> Any:
        return in_pieces(mixer, given, facts, pieces, dtype, beside) * (1.25 if dtype == torch.bfloat16 else 1)

    with monkeypatch.context() as patch:
        patch.setattr(state_probe, "_in_pieces", other)
        line = device_kernels.recurrence(CPU, config)
        assert line.startswith("wrong: 2 recurrent layers with 2 states, 2 of them by compiled operators; the same")
        assert "off by 2" in line
    monkeypatch.setattr(device_kernels.layers, "prepare", lambda *_: "torch, because Triton's product fails")
    assert device_kernels.recurrence(CPU, config).startswith("wrong: ")


@pytest.mark.parametrize("name", device_kernels.UNCLAMPED)
def test_a_layer_of_mamba_2_without_limits_is_checked(name: str) -> None:
    """With heads of 64 and states of 128 and 256: only such a layer is one function in chunks and single tokens."""
    model = model_of(device_kernels.UNCLAMPED[name], torch.bfloat16, torch.device("meta"))
    [module] = [each for each in model.modules() if hasattr(each, "time_step_limit")]
    assert recurrences.one_function(module)
    assert f"heads of {module.head_dim}, state of {module.ssm_state_size}" in name


@pytest.mark.skipif(kernels.serving(CPU) == kernels.REFERENCE, reason="plain PyTorch has no operators")
def test_captured_steps_are_compared_over_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sequences that wait, come, are preempted and go, half of them sampled. Controls: sampling that chooses other
    tokens, and states that are never kept."""
    for name in ("llama", "lfm2"):
        line = device_kernels.streams(CPU, name)
        assert line.startswith("the same tokens with and without, ")
        assert " 0 preemptions" not in line
    draw = sampler.draw
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "draw", lambda *given, compiled: (draw(*given, compiled=compiled) + compiled) % 64)
        assert device_kernels.streams(CPU, "llama") == "wrong: other tokens by captured steps and compiled sampling"
    logits = Decode.logits

    def unlike(self: Decode, batch: Batch) -> torch.Tensor | None:
        found = logits(self, batch)
        self._pages.states.begin()  # type: ignore[union-attr]
        return found

    monkeypatch.setattr(Decode, "logits", unlike)
    assert device_kernels.streams(CPU, "lfm2") == "wrong: other tokens by captured steps and compiled sampling"


def test_sampling_of_a_large_batch_is_compared_with_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two parts, with rows of a grammar, and one without a token. Control: a second part that chooses others."""
    pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")
    monkeypatch.setattr(gpu_sampling, "TILE", 64)  # the interpreter takes a millisecond for each
    monkeypatch.setattr(gpu_sampling, "TRIED", gpu_sampling.TRIED[:9])
    monkeypatch.setattr(gpu_sampling, "WORKSPACE", gpu_sampling.TOGETHER * 100)
    assert device_kernels.sampling(CPU, 20, 100) == "the tokens of plain PyTorch"
    sample = gpu_sampling.sample
    second = torch.arange(20) >= gpu_sampling.TOGETHER
    monkeypatch.setattr(gpu_sampling, "sample", lambda *given: sample(*given) + second)
    assert device_kernels.sampling(CPU, 20, 100) == "wrong: other tokens"


def test_control_a_check_that_fails_or_breaks_is_counted_and_the_rest_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    """An hour with a device is short."""

    def breaks() -> str:
        raise RuntimeError("an illegal instruction\nwas encountered")

    assert device_kernels.run([("a", lambda: "wrong: by 3"), ("b", breaks), ("c", lambda: "equal")]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["a: wrong: by 3", "b: wrong: RuntimeError: an illegal instruction", "c: equal"]


def test_the_device_is_asked_about_every_reach_head_size_and_type_of_pages() -> None:
    """All that the kernels claim to serve; and about products, plain and over codes."""
    names = [name for name, _ in device_kernels.checks(torch.device("cpu"), ["llama"])]
    assert {"digests", "sampling", "family llama"} <= set(names)
    assert sum(name.startswith("recurrence") for name in names) == 6
    assert len(names) == len(set(names)) == 14 + len(list(device_kernels.calls())) * 3 * 3 + 2 * 3 + 7 + 2 + 2 * (2 + 6)


def test_the_documents_name_checks_that_there_are() -> None:
    """A loan of a GPU is short: what is to be run is known by its name, and how many checks that is."""
    names = [name for name, _ in device_kernels.checks(CPU, ["llama", *HYBRID])]
    texts = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("design.md", "lab-notes/gpu.md")}
    for text in texts.values():
        named = re.findall(r'--only\s+"([^"]+)"', text)
        assert named
        assert [each for each in named if not any(name.startswith(" ".join(each.split())) for name in names)] == []
    counted = re.findall(r'--only "([^"]+)"` \| (\d+) \|', texts["lab-notes/gpu.md"])
    assert len(counted) > 5
    assert {only: sum(name.startswith(only) for name in names) for only, _ in counted} == {
        only: int(count) for only, count in counted
    }


@pytest.mark.parametrize(
    ("changes", "held", "wrong"),
    [
        ({}, [], 0),
        ({"token_ids": [1, 3]}, [], 1),
        ({"attempts": 2}, [], 1),
        ({"path": "local"}, [], 1),
        ({}, ["decode-0: a request holds 4"], 1),
    ],
    ids=["right", "another token", "a second attempt", "no handoff", "a block that is held"],
)
def test_control_each_difference_of_a_pair_is_counted(changes: dict[str, Any], held: list[str], wrong: int) -> None:
    """Tokens, the path of the KV, and the books."""

    def answer(**given: Any) -> Any:
        receipt = {"path": "disaggregated", "attempts": 1, "notes": [], "ttft": 0.1, "tpot": 0.01, "transfer": None}
        own = {"token_ids": [1, 2], **{key: value for key, value in given.items() if key == "token_ids"}}
        return SimpleNamespace(**own, receipt=SimpleNamespace(**receipt | given))

    assert device_handoff.report([answer()], [answer(**changes)], held) == wrong


def test_a_handoff_shows_each_workers_pool_and_the_time_of_the_first_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a worker measures its pool, and only its first read opens the memory of the other one."""
    pair, last = {"path": "disaggregated", "attempts": 1, "notes": [], "ttft": 0.1, "tpot": 0.01}, "nothing else"
    reads = iter(range(100))

    class Local(MagicMock):
        def last_words(self, name: str) -> str:
            return f"loading\nKV pool: 7 blocks of {name}\n{last}\n"

    def generate(*_: object, **__: object) -> Any:
        return SimpleNamespace(token_ids=[1], receipt=SimpleNamespace(**pair, transfer=f"read {next(reads)}"))

    client = MagicMock(generate=generate)
    client.__enter__.return_value = client
    client.audit.return_value = SimpleNamespace(unreachable={}, ledgers=[])
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    monkeypatch.setattr(device_handoff, "make_checkpoint", lambda *_: tmp_path)
    monkeypatch.setattr(device_handoff, "Local", Local)
    monkeypatch.setattr(device_handoff, "Client", lambda _: client)
    assert device_handoff.run(replace(device_handoff.TINY, requests=1), "cpu", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    workers = ("decode-0", "prefill-0", "decode-0")
    assert [line for line in lines if "pool" in line] == [f"{name}: KV pool: 7 blocks of {name}" for name in workers]
    assert not [line for line in lines if last in line]
    assert "transfer of the first: read 2" in lines


def test_control_a_process_that_dies_is_one_wrong_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel can end a process. Another one goes on with the next check."""
    ours = [SimpleNamespace(recv=_raise_eof, send=None), SimpleNamespace(recv=lambda: ("equal", True), send=None)]
    started: list[str] = []

    def process(first: str, device: torch.device) -> Any:
        started.append(first)
        return _Hashable(ours[len(started) - 1])

    monkeypatch.setattr(device_kernels, "_process", process)
    monkeypatch.setattr(device_kernels, "wait", lambda connections: connections)
    assert device_kernels.run_at_once(["a", "b"], CPU, 1) == 1
    assert started == ["a", "b"]


def _raise_eof() -> Any:
    raise EOFError


class _Hashable:
    def __init__(self, connection: Any) -> None:
        self.recv, self.send = connection.recv, connection.send
