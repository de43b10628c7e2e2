"""From settings to an engine: what `auto` means."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine import builder, calibration
from engine.builder import _device, _dtype, _largest_step, token_budget
from engine.core.step_time import PROMPTS_S
from engine.loading.model_loader import load_model
from engine.runner.model_runner import ModelRunner
from loadtest.harness.random_checkpoints import make_checkpoint
from services.worker import alone_s
from tandem.errors import CheckpointRefused, SettingsError
from tandem.settings import STRETCH_ALONE, STRETCH_WITH_PREFILL, Settings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # only named here, never used


def test_streams_wait_longer_for_prompts_only_where_these_have_no_other_place() -> None:
    """Without prefill workers a step may be longer; a configured number holds with and without them."""
    for prefill, default in ((1, STRETCH_WITH_PREFILL), (0, STRETCH_ALONE)):
        assert Settings(model="m", prefill=prefill).stretch == default
        assert Settings(model="m", prefill=prefill, stream_stretch=1.0).stretch == 1.0
    assert STRETCH_WITH_PREFILL < STRETCH_ALONE


def test_with_an_objective_a_step_may_be_as_long_as_keeps_it() -> None:
    """With and without prefill workers; half of it, since KV may arrive in its middle. A configured number holds."""
    for prefill in (0, 1):
        about = Settings(model="m", prefill=prefill, slo_tpot_s=0.1)
        assert (about.stretch, about.beside_s) == (STRETCH_WITH_PREFILL, pytest.approx(0.05))
        about = Settings(model="m", prefill=prefill, slo_tpot_s=0.1, stream_stretch=3.0)
        assert (about.stretch, about.beside_s) == (3.0, 0.0)
    assert Settings(model="m").beside_s == 0.0


def test_a_stream_whose_kv_arrives_in_the_middle_of_a_prompt_waits_at_most_half_of_its_objective() -> None:
    """For the step to end. Without prefill workers no KV arrives, and a prefill worker has no streams."""

    def seconds(role: str, prefill: int, tpot_s: float | None) -> float:
        return alone_s(role, Settings(model="m", prefill=prefill, slo_tpot_s=tpot_s))

    assert seconds("decode", 1, 0.2) == 0.1
    assert {seconds("decode", 0, 0.2), seconds("prefill", 1, 0.2)} == {PROMPTS_S}
    assert {seconds("decode", 1, None), seconds("decode", 1, 10.0)} == {PROMPTS_S}


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"torch_dtype": "float32"}, torch.float32),
        ({"text_config": {"dtype": "bfloat16"}}, torch.bfloat16),
        ({"dtype": "float16"}, torch.bfloat16),
        ({"dtype": None}, torch.float32),
        ({}, torch.float32),
    ],
    ids=str,
)
def test_auto_is_the_checkpoints_own_dtype_on_cuda(tmp_path: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    """No unnecessary rounding; float16, which no setting names, becomes bfloat16."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert _dtype(Settings(model=str(tmp_path)), CUDA) == dtype


def test_auto_is_float32_on_cpu_and_a_named_dtype_is_taken_everywhere(tmp_path: Path) -> None:
    """On CPU a stream resumes token for token, whatever the checkpoint holds."""
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    assert _dtype(Settings(model=str(tmp_path)), CPU) == torch.float32
    for device in (CPU, CUDA):
        assert _dtype(Settings(model=str(tmp_path), dtype="bfloat16"), device) == torch.bfloat16
        assert _dtype(Settings(model=str(tmp_path), dtype="float32"), device) == torch.float32


def test_a_step_has_as_many_tokens_as_its_device_computes_well() -> None:
    """512 on CPU, 8,192 on CUDA, and room for every stream; a configured number holds everywhere."""
    own = Settings(model="m")
    assert (token_budget(own, CPU), token_budget(own, CUDA)) == (512, 8192)
    many = Settings(model="m", max_num_seqs=1024)
    assert (token_budget(many, CPU), token_budget(many, CUDA)) == (1024, 8192)
    named = Settings(model="m", max_num_batched_tokens=100)
    assert token_budget(named, CPU) == token_budget(named, CUDA) == 100


@pytest.mark.parametrize(("device", "done"), [(CUDA, 130 - 32), (CPU, 0)], ids=str)
def test_memory_is_measured_with_the_longest_context_on_cuda(device: torch.device, done: int) -> None:
    """There attention may take memory by the length of the context, which the first chunk of a prompt would not show;
    the blocks that this needs are those of one chunk."""
    model = SimpleNamespace(max_model_len=130, vocab_size=10, device=device)
    settings = Settings(model="m", max_num_batched_tokens=32, max_num_seqs=4)
    batch, blocks = _largest_step(cast(ModelRunner, model), settings)
    batch.check(settings.block_size, blocks)
    assert (batch.positions, batch.context_lens, blocks) == ([*range(done, done + 32)], [done + 32], 2)


def test_a_step_is_timed_from_an_idle_device() -> None:
    """A forward returns before a GPU has computed it: the warm-up would be in the time of the step after it."""
    done: list[str] = []
    logits = SimpleNamespace(cpu=lambda: done.append("waits"))

    def forward(*_: object) -> Any:
        done.append("queued")
        return logits

    engine: Any = SimpleNamespace(config=SimpleNamespace(max_running=1), forward=forward)
    calibration.captured_seconds(engine)
    model: Any = SimpleNamespace(vocab_size=9, allocate=lambda *_: None, forward=forward)
    calibration.pace(model, 31, 4, 16)
    assert done == ["queued", "waits"] * 8, "two forwards of each of four steps"


def test_pages_are_not_put_into_memory_that_no_other_process_can_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expandable segments are refused by name on CUDA, before a model is loaded; without them nothing is said."""
    monkeypatch.setattr(builder.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(builder.torch.cuda, "current_device", lambda: 0)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "garbage_collection_threshold:0.8, expandable_segments: True")
        with pytest.raises(SettingsError, match=f"{name} has expandable_segments"):
            _device(Settings(model="m"))
        monkeypatch.setenv(name, "expandable_segments:False")
    assert _device(Settings(model="m")) == torch.device("cuda", 0)


def test_a_worker_that_requires_a_gpu_does_not_serve_on_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With device cuda, which the Helm chart sets for a pod with a GPU, a worker without a usable driver refuses to
    start. The control: with auto it serves on its CPU."""
    monkeypatch.setattr(builder.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match="finds no CUDA device"):
        _device(Settings(model="m", device="cuda"))
    assert _device(Settings(model="m", device="auto")) == torch.device("cpu")


def test_two_workers_of_one_gpu_take_their_shares_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when both look at the free memory at the same moment: it is all of the GPU's then."""
    gib = 2**30
    monkeypatch.setattr(builder.torch.cuda, "mem_get_info", lambda _: (80 * gib, 80 * gib))
    monkeypatch.setattr(builder.torch.cuda, "memory_reserved", lambda _: 10 * gib)
    assert builder._free_bytes(CUDA, 0, 0.5) == 30 * gib
    assert builder._free_bytes(CUDA, 0, 1.0) == 70 * gib


@pytest.mark.parametrize("kept", [False, True], ids=["returned", "control: torch keeps it"])
def test_the_largest_step_is_taken_from_the_pool_once(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """torch keeps the memory that the measured step has freed, with that of its pages, until it is asked for it: it
    would be missing from what is free, and the step is subtracted from that."""
    gib, model_gib, step_gib, pages_gib = 2**30, 10, 6, 2
    reserved = [model_gib * gib]

    def profiled(*_: Any) -> int:
        reserved[0] += (step_gib + pages_gib) * gib
        return step_gib * gib

    def empty() -> None:
        reserved[0] = reserved[0] if kept else model_gib * gib

    monkeypatch.setattr(builder, "_profile", profiled)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 * gib - reserved[0], 80 * gib))
    layout = SimpleNamespace(state_bytes=0, state_blocks=0)
    model: Any = SimpleNamespace(
        layout=lambda _: layout, group=None, mapped_bytes=0, device=CUDA, block_bytes=lambda _: 2**20,
        max_model_len=16_000,
    )  # fmt: skip
    settings = Settings(model="m", memory_utilization=0.5, max_num_seqs=64)
    blocks = builder._measured_blocks(model, None, settings, lambda _: None)
    missing = step_gib + pages_gib if kept else 0
    assert blocks == 1024 * (80 - model_gib - missing - step_gib) // 2


def longrope(folder: Path, original: int) -> str:
    """A checkpoint of Phi-3's kind: it takes 1,024 tokens by its config, and is served up to `original`."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": original,
    }
    return str(make_checkpoint(folder, "tiny-phi3", rope_parameters=rope, original_max_position_embeddings=original))


def test_a_draft_model_is_as_long_as_its_target_or_as_it_can_be(tmp_path: Path) -> None:
    """No setting names its length, so that advice to set one could not be followed. The control: loaded without one, it
    is refused."""
    target, shorter = longrope(tmp_path / "target", 256), longrope(tmp_path / "shorter", 128)
    model = load_model(target, dtype=torch.float32, device=CPU, max_model_len=256)
    for draft_model, length in ((target, 256), (shorter, 128)):
        settings = Settings(model=target, max_model_len=256, speculation="draft", draft_model=draft_model)
        draft = builder._draft_model(settings, model, lambda line: None)
        assert draft is not None
        assert draft.max_model_len == length
        with pytest.raises(CheckpointRefused, match=f"set max_model_len to {length}"):
            load_model(draft_model, dtype=torch.float32, device=CPU)
    short = load_model(target, dtype=torch.float32, device=CPU, max_model_len=64)
    draft = builder._draft_model(settings, short, lambda line: None)
    assert draft is not None
    assert draft.max_model_len == 64
