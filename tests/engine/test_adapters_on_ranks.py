"""A worker of several ranks serves adapters: each rank has its part of A and B, and none serves another adapter than
the others."""

from __future__ import annotations

import shutil
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import kernels
from engine.core.sequence import LoraSlot
from engine.engine import Engine
from engine.loading import cut_check, lora_attachment, lora_loader
from engine.loading.self_check import pack
from engine.runner import lora, model_runner
from engine.runner.lora import Adapter, LowRank
from loadtest.harness.random_checkpoints import make_adapter, make_checkpoint
from planner.capacity import read_shape
from planner.ranks import of_ranks
from tandem.errors import CheckpointRefused, Unavailable
from tests.engine.conftest import TWO, two_layers
from tests.engine.test_lora import follow, run
from tests.engine.test_ranks import CUTS, PROMPTS, engine_of, random_biases, table
from tests.support import oracle

pytestmark = pytest.mark.skipif(
    kernels.serving(kernels.CPU) == kernels.REFERENCE, reason="ranks need the compiled operators"
)
LENGTHS = [4, 21, 1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "tiny-llama", dtype="float32", num_hidden_layers=TWO)


@pytest.fixture(scope="module")
def folders(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return two_adapters(tiny, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def references(tiny: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return merged(tiny, folders, tmp_path_factory.mktemp("merged"))


def two_adapters(base: Path, folder: Path) -> dict[str, Path]:
    return {
        "a": make_adapter(folder / "a", base, seed=1, rank=4, lora_alpha=6),
        "b": make_adapter(folder / "b", base, seed=2, rank=17, strength=1.0),
    }


def merged(base: Path, folders: dict[str, Path], folder: Path) -> dict[str, Path]:
    """By name, a checkpoint with the adapter merged into its weights; "" is the base."""
    return {"": base, **{name: oracle.merged(base, one, folder / f"+{name}") for name, one in folders.items()}}


def given(folders: dict[str, Path]) -> Any:
    return {name: str(folder) for name, folder in folders.items()}


def placed(engine: Engine, names: dict[str, int]) -> dict[str, LoraSlot | None]:
    """Puts each adapter into its slot; "" is the base."""
    found: dict[str, LoraSlot | None] = {"": None}
    for name, slot in names.items():
        assert engine.model.lora is not None
        adapter = lora_loader.read_again(engine.model.lora.known[name])
        engine.model.put_adapter(slot, adapter)
        found[name] = LoraSlot(slot, adapter.fingerprint)
    return found


def tokens(engine: Engine, at: dict[str, LoraSlot | None], asked: list[tuple[str, list[int]]]) -> list[list[int]]:
    return run(engine.model, [(at[name], prompt) for name, prompt in asked])


# ---- what they compute


@pytest.mark.parametrize("cut", ["biases", "four ranks, two KV heads", "phi3", "deepseek-v3"])
def test_several_ranks_give_the_tokens_of_merged_weights(cut: str, tmp_path: Path) -> None:
    """For two adapters and the base in one batch, whatever is cut and whatever stays whole; and again after the slots
    have changed hands."""
    shape, changes, ranks = CUTS[cut]
    base = make_checkpoint(tmp_path / "base", shape, dtype="float32", **two_layers(shape), **changes)
    if cut == "biases":
        random_biases(base)
    folders = two_adapters(base, tmp_path)
    if cut == "deepseek-v3":  # of which one product does not see the tokens row by row
        folders = {name: make_adapter(tmp_path / name, base, seed=n, layers=ROW_BY_ROW) for n, name in enumerate("ab")}
    references = merged(base, folders, tmp_path)
    asked = list(product(references, oracle.prompts(base, LENGTHS)))
    with engine_of(base, ranks, adapters=given(folders)) as (engine, _):
        for slots in ({"a": 0, "b": 1}, {"a": 1, "b": 0}):
            at = placed(engine, slots)
            assert follow(references, asked, tokens(engine, at, asked))
        assert not follow(references, asked, tokens(engine, {"": at["a"], "a": at["b"], "b": None}, asked))


ROW_BY_ROW = ("q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_a_tokens_bits_do_not_depend_on_company(tiny: Path, folders: dict[str, Path]) -> None:
    """Logits of a prompt with an adapter, alone and in chunks beside the base and another adapter."""
    prompt = PROMPTS[3]
    with engine_of(tiny, 2, adapters=given(folders)) as (engine, _):
        placed(engine, {"a": 0, "b": 1})
        alone = engine.model.forward(engine.pages, packed([(prompt, 0, 2)], [0]))
        first = [(PROMPTS[0], 0, 0), (prompt[:13], 0, 2), (PROMPTS[1], 0, 1)]
        engine.model.forward(engine.pages, packed(first, [1, 0, -1]))
        again = [(prompt, 13, 2), (PROMPTS[0], 0, 0), (PROMPTS[1], 0, 1)]
        assert torch.equal(alone[0], engine.model.forward(engine.pages, packed(again, [0, -1, 1]))[0])
        assert not torch.allclose(alone[0], engine.model.forward(engine.pages, packed([(prompt, 0, 2)], [1]))[0])


def packed(sequences: list[tuple[list[int], int, int]], slots: list[int]) -> Any:
    batch = pack([(prompt, done, table(number)) for prompt, done, number in sequences])
    batch.adapters = slots
    return batch


def test_adapters_are_beside_rounded_weights(tiny: Path, folders: dict[str, Path]) -> None:
    """In bfloat16, where the cut is checked against what rounding does to the model, and beside codes: nearly the log
    probabilities of one rank."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "weights": "int8"}
    step = packed([(PROMPTS[3], 0, 0), (PROMPTS[1], 0, 1)], [1, 0])
    found = []
    for ranks in (1, 2):
        with engine_of(tiny, ranks, adapters=given(folders), **settings) as (engine, _):
            placed(engine, {"a": 0, "b": 1})
            found.append(engine.model.forward(engine.pages, step).log_softmax(-1))
    spread = (found[0] - found[1]).abs().max()
    assert spread < 0.1 * found[0].std()


def test_an_adapter_that_comes_later_is_as_one_given_at_the_start(
    tiny: Path, folders: dict[str, Path], references: dict[str, Path], tmp_path: Path
) -> None:
    """Rank 0 reads it, and the others get what it has read. One that fits a rank and not the model is refused. The
    planner knows the bytes of the slots."""
    asked = list(product(("", "a"), oracle.prompts(tiny, LENGTHS)))
    with engine_of(tiny, 2, adapter_root=folders["a"].parent, adapter_slots=2) as (engine, _):
        assert engine.model.lora is not None
        later = lora_attachment.fitting(engine.model.lora, "a", folders["a"])
        engine.model.put_adapter(1, lora_loader.read_again(later))
        at = {"": None, "a": LoraSlot(1, later.fingerprint)}
        assert follow(references, asked, tokens(engine, at, asked))
        with pytest.raises(CheckpointRefused, match="rank 17, and a slot has room for 16"):
            lora_attachment.fitting(engine.model.lora, "b", folders["b"])
        with pytest.raises(CheckpointRefused, match=r"down_proj has lora_A .*, the base's weight is 64 x"):
            lora_attachment.fitting(engine.model.lora, "half", of_one_rank(folders["a"], tmp_path))
        planned = of_ranks(read_shape(tiny), tiny, 2)
        assert planned.adapter_bytes("float32", 2, 16) == 2 * engine.model.lora.pool.nbytes


def of_one_rank(folder: Path, copy: Path) -> Path:
    """An adapter with the first half of the rows of each B."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    file = copy / lora_loader.WEIGHTS
    halves = {name: each[: len(each) // 2] if "lora_B" in name else each for name, each in load_file(file).items()}
    save_file({name: each.contiguous() for name, each in halves.items()}, file)
    return copy


# ---- what is refused


def other_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 takes rank 1's columns of A."""
    own = lora.Place.own

    def wrong(place: lora.Place, layer: LowRank) -> LowRank:
        if place.part is None or place.part.dim == 0:
            return own(place, layer)
        return own(place, layer._replace(a=layer.a.roll(place.width, 1)))

    monkeypatch.setattr(lora.Place, "own", wrong)


def other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 takes rank 1's rows of B."""
    own = lora.Place.own

    def wrong(place: lora.Place, layer: LowRank) -> LowRank:
        if place.part is None or place.part.dim == 1:
            return own(place, layer)
        return own(place, layer._replace(b=layer.b.roll(place.height, 0)))

    monkeypatch.setattr(lora.Place, "own", wrong)


@pytest.mark.parametrize(("fault", "checked"), [(other_columns, True), (other_rows, True), (other_columns, False)])
def test_a_wrong_part_of_an_adapter_is_refused_at_load(
    fault: Any,
    checked: bool,
    tiny: Path,
    folders: dict[str, Path],
    references: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the control, without the comparison with the whole model, wrong tokens are served: self-checks see the path
    and not the cut."""
    fault(monkeypatch)
    if checked:
        with (
            pytest.raises(CheckpointRefused, match="differs from the whole model"),
            engine_of(tiny, 2, adapters=given(folders)),
        ):
            pass
        return
    monkeypatch.setattr(cut_check, "_gap", lambda *_: 0.0)
    asked = [("a", prompt) for prompt in oracle.prompts(tiny, LENGTHS)]
    with engine_of(tiny, 2, adapters=given(folders)) as (engine, _):
        assert not follow(references, asked, tokens(engine, placed(engine, {"a": 0}), asked))


def test_ranks_that_read_other_adapters_do_not_start(
    tiny: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under one name, here of another shape."""
    read = lora_loader.read
    monkeypatch.setattr(lora_loader, "read", lambda name, folder, *most: read(name, folders["b"], *most))
    with (
        pytest.raises(CheckpointRefused, match="do not have the same adapters"),
        engine_of(tiny, 2, adapters={"a": str(folders["a"])}),
    ):
        pass


def sent_as(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """The other ranks get something else than rank 0 puts."""
    right = lora.sent
    monkeypatch.setattr(model_runner, "sent", lambda adapter: right(change(adapter)))


def test_a_rank_with_another_adapter_serves_nothing(
    tiny: Path, folders: dict[str, Path], references: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step that names the slot ends the group. In the control, where the other adapter has the right one's
    fingerprint, wrong tokens are served."""
    other = lora_loader.read("b", folders["b"])
    asked = [("a", prompt) for prompt in oracle.prompts(tiny, LENGTHS)]
    with engine_of(tiny, 2, adapters=given(folders)) as (engine, _):
        with monkeypatch.context() as control:
            sent_as(control, lambda own: other._replace(fingerprint=own.fingerprint))
            assert not follow(references, asked, tokens(engine, placed(engine, {"a": 0}), asked))
        assert follow(references, asked, tokens(engine, placed(engine, {"a": 0}), asked))
        sent_as(monkeypatch, lambda own: other)
        at = placed(engine, {"a": 0})
        with pytest.raises(Unavailable):
            tokens(engine, at, asked)


def test_a_rank_whose_slot_is_empty_serves_nothing(tiny: Path, folders: dict[str, Path]) -> None:
    """Rank 0 alone has filled the slot. A group that has ended takes no adapter either."""
    with engine_of(tiny, 2, adapters=given(folders)) as (engine, _):
        assert engine.model.lora is not None
        engine.model.lora.put(0, lora_loader.read_again(engine.model.lora.known["a"]))
        with pytest.raises(Unavailable):
            engine.model.forward(engine.pages, packed([(PROMPTS[0], 0, 0)], [0]))
        with pytest.raises(Unavailable, match="a rank of this worker is lost"):
            placed(engine, {"a": 1})


def test_a_rank_that_dies_while_it_takes_an_adapter_ends_the_group(
    tiny: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rank 0 does not wait for it."""
    with engine_of(tiny, 2, adapters=given(folders)) as (engine, processes):
        assert engine.model.lora is not None
        monkeypatch.setattr(engine.model.lora, "_put", lambda *_: processes[0].send_signal(signal.SIGKILL))
        processes[0].send_signal(signal.SIGSTOP)  # it has not answered when it dies
        with pytest.raises(Unavailable, match="a rank of this worker is lost"):
            placed(engine, {"a": 0})


def too_wide(adapter: Adapter) -> Adapter:
    """An adapter that no slot holds."""
    return adapter._replace(
        layers={name: layer._replace(a=torch.ones(99, 9999)) for name, layer in adapter.layers.items()}
    )


def test_a_rank_that_cannot_take_an_adapter_fails_it_for_all(
    tiny: Path, folders: dict[str, Path], references: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 or another one. The slot, which had another adapter, is empty on all ranks; the worker goes on, and the
    slot takes the next adapter."""
    asked = list(product(references, oracle.prompts(tiny, LENGTHS)))
    with engine_of(tiny, 2, adapters=given(folders)) as (engine, _):
        assert engine.model.lora is not None
        for on_rank_0 in (True, False):
            placed(engine, {"b": 0})
            with monkeypatch.context() as fault:
                if on_rank_0:
                    fault.setattr(engine.model.lora, "_put", lambda *_: 1 / 0)
                else:
                    sent_as(fault, too_wide)
                with pytest.raises(Unavailable, match="was put into no slot"):
                    placed(engine, {"a": 0})
            assert engine.model.lora.slots == [None, None]
        at = placed(engine, {"a": 1, "b": 0})
        assert follow(references, asked, tokens(engine, at, asked))
