"""LoRA adapters in one model: exactly what merged weights give, row by row; folders that would not are refused.

Whole requests with adapters are in tests/journey/test_adapters.py, their bits in test_exactness.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.forward_context import Batch, Rows
from engine.core import block_hash
from engine.core.engine_config import EngineConfig
from engine.core.sequence import LoraSlot, Sequence
from engine.engine import Engine
from engine.loading import lora_attachment, lora_loader
from engine.loading.model_loader import load_model
from engine.runner import lora
from engine.runner.model_runner import ModelRunner
from loadtest.harness.random_checkpoints import make_adapter, make_checkpoint
from tandem.errors import CheckpointRefused
from tests.support import oracle

CPU = torch.device("cpu")
NEW = 12
LENGTHS = [4, 21, 1, 40]
# An adapter is on a product, whatever the family does with its result: plain ones, with biases, beside experts of two
# kinds, transposed ones, joined ones.
FAMILIES = ["llama", "qwen2", "qwen3-moe", "gpt2", "phi3", "gpt-oss"]


def load(base: Path, folders: dict[str, Path], slots: int = 8, **options: Any) -> ModelRunner:
    return load_model(str(base), dtype=torch.float32, device=CPU, adapters=folders, adapter_slots=slots, **options)


def placed(model: ModelRunner, names: dict[str, int]) -> dict[str, LoraSlot | None]:
    """Puts each adapter into its slot; "" is the base."""
    found: dict[str, LoraSlot | None] = {"": None}
    for name, slot in names.items():
        assert model.lora is not None
        adapter = lora_loader.read_again(model.lora.known[name])
        model.lora.put(slot, adapter)
        found[name] = LoraSlot(slot, adapter.fingerprint)
    return found


def run(model: ModelRunner, asked: list[tuple[LoraSlot | None, list[int]]]) -> list[list[int]]:
    """Greedy tokens of all requests in one engine, 24 tokens a step."""
    engine = Engine(model, EngineConfig(num_blocks=200, block_size=4, token_budget=24, max_running=24))
    sequences = [
        Sequence(
            id=str(number), tokens=list(prompt), prompt_len=len(prompt), max_len=len(prompt) + NEW, adapter=adapter
        )
        for number, (adapter, prompt) in enumerate(asked)
    ]
    for sequence in sequences:
        engine.add(sequence)
    while engine.sequences:
        engine.step()
    return [sequence.tokens[sequence.prompt_len :] for sequence in sequences]


def follow(references: dict[str, Path], asked: list[tuple[str, list[int]]], answers: list[list[int]]) -> bool:
    """Whether each is what transformers gives for its reference, of the full length."""
    return all(
        len(answer) == NEW and oracle.follows(references[name], prompt, answer)
        for (name, prompt), answer in zip(asked, answers, strict=True)
    )


@pytest.mark.parametrize(
    ("family", "kernels"),
    [*((family, "auto") for family in FAMILIES), ("llama", "reference"), ("gpt2", "reference")],
)
def test_tokens_equal_merged_weights(
    family: str, kernels: Any, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two adapters and the base in one batch, as transformers gives with W + scale * B A; and again after the slots
    have changed hands, which a recorded step must notice."""
    base = checkpoint(f"tiny-{family}")
    folders = {
        "a": make_adapter(tmp_path / "a", base, seed=1, rank=4, lora_alpha=6),
        "b": make_adapter(tmp_path / "b", base, seed=2, rank=17, strength=1.0),
    }
    references = {"": base, **{name: oracle.merged(base, one, tmp_path / f"+{name}") for name, one in folders.items()}}
    prompts = oracle.prompts(base, LENGTHS)
    asked = list(product(references, prompts))
    model = load(base, folders, kernels=kernels)
    answers: list[list[int]] = []
    for slots in ({"a": 0, "b": 1}, {"a": 1, "b": 0}):
        at = placed(model, slots)
        answers = run(model, [(at[name], prompt) for name, prompt in asked])
        assert follow(references, asked, answers)
    for at_prompt in range(len(prompts)):
        own = {tuple(answers[number]) for number in range(at_prompt, len(answers), len(prompts))}
        assert len(own) > 1, "an adapter that changes nothing proves nothing"
    wrong = {"": at["a"], "a": at["b"], "b": None}
    assert not follow(references, asked, run(model, [(wrong[name], prompt) for name, prompt in asked]))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_that_comes_later_is_as_one_given_at_the_start(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of a smaller rank and on fewer layers than there is room for, beside one of the start with more rank than later
    ones may have: what transformers gives with merged weights."""
    base = checkpoint(f"tiny-{family}")
    given = make_adapter(tmp_path / "given", base, seed=1, rank=20)
    model = load(base, {"given": given}, slots=2, later_rank=8)
    assert model.lora is not None
    layers = ("c_attn",) if family == "gpt2" else ("o_proj",)
    folder = make_adapter(tmp_path / "later", base, seed=2, rank=5, layers=layers, strength=1.0)
    later = lora_attachment.fitting(model.lora, "later", folder)
    assert later.layers == {}
    at = placed(model, {"given": 1})
    model.lora.put(0, lora_loader.read_again(later))
    at["later"] = LoraSlot(0, later.fingerprint)
    adapters = {"given": given, "later": folder}
    references = {"": base} | {name: oracle.merged(base, one, tmp_path / f"+{name}") for name, one in adapters.items()}
    asked = list(product(references, oracle.prompts(base, LENGTHS)))
    assert follow(references, asked, run(model, [(at[name], prompt) for name, prompt in asked]))


@pytest.mark.parametrize("family", ["phi3", "llama4-text"])
def test_one_rounding_is_no_difference_of_the_operator(family: str, tmp_path: Path) -> None:
    """In bfloat16 the last place of a value of eight times the mean is more than 5 % of the mean: these two were
    refused for it."""
    base = make_checkpoint(tmp_path, f"tiny-{family}", dtype="bfloat16")
    model = load_model(str(base), dtype=torch.bfloat16, device=CPU, adapter_slots=3, later_rank=16)
    assert model.lora is not None
    assert len(model.lora.slots) == 3


def test_an_operator_that_differs_is_refused(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one tenth of the mean, in one value."""
    product_of = lora_attachment.plain

    def wrong(y: torch.Tensor, *rest: Any) -> torch.Tensor:
        y = product_of(y, *rest)
        y[0, 0] += 0.1 * y.square().mean().sqrt()
        return y

    monkeypatch.setattr(lora_attachment, "plain", wrong)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(CheckpointRefused, match="the compiled operator"):
            load_model(str(checkpoint("tiny-llama")), dtype=dtype, device=CPU, later_rank=16)


def test_a_model_without_adapters_pays_nothing(checkpoint: Callable[[str], Path]) -> None:
    """No class is changed, no tensor is made and the recording has no input for them."""
    model = load(checkpoint("tiny-llama"), {})
    assert model.lora is None
    assert not [module for module in model.module.modules() if isinstance(module, lora.Adapted)]
    assert not [module for module in model.module.modules() if "_tandem_lora" in module.__dict__]


def test_only_layers_that_some_adapter_touches_change(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The other layers are as without adapters."""
    base = checkpoint("tiny-llama")
    model = load(base, {"a": make_adapter(tmp_path / "a", base, layers=("q_proj", "down_proj"))})
    changed = {name.rpartition(".")[2] for name, one in model.module.named_modules() if isinstance(one, lora.Adapted)}
    assert changed == {"q_proj", "down_proj"}


def shifted(rows: Any) -> Any:
    """Each row gets the adapter of the row after it."""

    def of(self: lora.Lora, batch: Batch) -> Rows:
        right: Rows = rows(self, batch)
        order = (right.tensors[0] + 1) % len(right.tensors[0])
        groups = tuple((slot, terms, (own + 1) % len(order)) for slot, terms, own in right.groups)
        return Rows((order, *right.tensors[1:]), groups)

    return of


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_step_that_mixes_adapters_up_is_refused_at_load(
    kernels: Any, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-check packs random adapters and the base together: rows that get a neighbour's adapter are noticed."""
    base = checkpoint("tiny-llama")
    made = {name: make_adapter(tmp_path / name, base) for name in "ab"}
    monkeypatch.setattr(lora.Lora, "rows", shifted(lora.Lora.rows))
    with pytest.raises(CheckpointRefused, match="adapters cannot be served"):
        load(base, made, kernels=kernels)


def test_a_slot_with_another_adapter_is_never_used(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """In every step the engine compares the adapter of a sequence with the one in its slot."""
    base = checkpoint("tiny-llama")
    model = load(
        base, {name: make_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate("ab")}, slots=1
    )
    at = placed(model, {"a": 0})
    placed(model, {"b": 0})
    with pytest.raises(AssertionError, match="has adapter b now"):
        run(model, [(at["a"], [1, 2, 3])])


def test_hashes_differ_by_adapter() -> None:
    """Also from the hash of any salt that a client may send; without an adapter they are unchanged."""
    tokens, one = list(range(8)), b"f" * 16
    assert block_hash.chain(tokens, 4, b"salt", adapter=one) != block_hash.chain(tokens, 4, b"salt")
    assert block_hash.chain(tokens, 4, b"salt", adapter=one) != block_hash.chain(tokens, 4, b"salt", adapter=b"g" * 16)
    assert block_hash.chain(tokens, 4, b"", adapter=one) not in [
        block_hash.chain(tokens, 4, salt) for salt in (one, one + b"salt", one.ljust(128, b"\0"))
    ]
    assert block_hash.chain(tokens, 4, b"salt", adapter=b"") == block_hash.chain(tokens, 4, b"salt")


# ---- folders


def test_a_fingerprint_is_of_what_an_adapter_does(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Other metadata change nothing; other weights or another scale do."""
    base = checkpoint("tiny-llama")

    def fingerprint(**changes: Any) -> bytes:
        return lora_loader.read("x", make_adapter(tmp_path / "x", base, **changes)).fingerprint

    plain = fingerprint()
    assert fingerprint(base_model_name_or_path="elsewhere", lora_dropout=0.5, peft_version="99") == plain
    assert len({plain, fingerprint(seed=1), fingerprint(lora_alpha=5), fingerprint(use_rslora=True)}) == 4


def test_patterns_name_layers_by_their_end(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """rank_pattern and alpha_pattern are regular expressions as PEFT has them; the first that matches counts."""
    base = checkpoint("tiny-llama")
    patterns = {"alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 8, "q_proj": 2, "v_proj": 5, "_proj": 3}}
    layers = lora_loader.read("x", make_adapter(tmp_path / "x", base, rank=4, lora_alpha=4, **patterns)).layers
    scales = {name.removeprefix("model.layers."): one.scale for name, one in layers.items()}
    assert scales["1.self_attn.q_proj"] == 2.0
    assert scales["0.self_attn.q_proj"] == 0.5
    assert scales["0.self_attn.v_proj"] == 1.25
    assert scales["0.self_attn.k_proj"] == 1.0, "_proj alone is not the end after a dot"


CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("use_dora", {"use_dora": True}),
    ("bias", {"bias": "lora_only"}),
    ("lora_bias", {"lora_bias": True}),
    ("modules_to_save", {"modules_to_save": ["lm_head"]}),
    ("trainable_token_indices", {"trainable_token_indices": [1]}),
    ("target_parameters", {"target_parameters": ["experts.down_proj"]}),
    ("layer_replication", {"layer_replication": [[0, 2]]}),
    ("alora_invocation_tokens", {"alora_invocation_tokens": [1, 2]}),
    ("use_qalora", {"use_qalora": True}),
    ("init_lora_weights", {"init_lora_weights": "pissa"}),
    ("peft_type", {"peft_type": "IA3"}),
    ("of_a_later_year", {"of_a_later_year": {"x": 1}}),
    ("rank_pattern", {"rank_pattern": [1]}),
    ("r is", {"r": 0}),
    ("lora_alpha is", {"lora_alpha": "much"}),
    ("rank is 5", {"r": 5}),
    ("rank is 9", {"rank_pattern": {"q_proj": 9}}),
    ("alpha_pattern", {"alpha_pattern": {"q_proj": "x"}}),
    ("regular expression", {"alpha_pattern": {"(": 1}}),
]


@pytest.mark.parametrize(("what", "changes"), CONFIGS, ids=[what for what, _ in CONFIGS])
def test_what_is_not_plain_lora_is_refused(
    what: str, changes: dict[str, Any], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each field that would change the answer is named, with its file; so is an unknown field."""
    folder = make_adapter(tmp_path / "x", checkpoint("tiny-llama"), **{"r": 4, **changes})
    with pytest.raises(CheckpointRefused, match=what) as caught:
        lora_loader.read("x", folder)
    assert str(folder) in str(caught.value)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def rename(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


TENSORS: list[tuple[str, Callable[[dict[str, torch.Tensor]], object]]] = [
    ("only one of lora_A and lora_B", lambda t: t.pop(f"{Q}.lora_B.weight")),
    ("which is not served", lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(3)})),
    ("which is not served", lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(3, 3)})),
    ("which is not served", lambda t: rename(t, f"{Q}.lora_A.weight", f"{Q[11:]}.lora_A.weight")),
    ("is not a linear layer", lambda t: [rename(t, f"{Q}.lora_{x}.weight", f"{Q}x.lora_{x}.weight") for x in "AB"]),
    (
        "is not a linear layer",
        lambda t: [
            rename(t, f"{Q}.lora_{x}.weight", f"base_model.model.model.embed_tokens.lora_{x}.weight") for x in "AB"
        ],
    ),
    ("the base's weight is 64 x 64", lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 65)})),
    ("its rank is 4", lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(5, 64)})),
    ("not a float matrix", lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 64, dtype=torch.int8)})),
    ("not a float matrix", lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4)})),
    ("holds no tensors", lambda t: t.clear()),
]


@pytest.mark.parametrize(("what", "change"), TENSORS, ids=[f"{n}-{what}" for n, (what, _) in enumerate(TENSORS)])
def test_tensors_that_do_not_fit_are_refused(
    what: str, change: Callable[[Any], object], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """A tensor that is missing, unused, of another shape or on another layer: nothing is left out silently."""
    base = checkpoint("tiny-llama")
    folder = make_adapter(tmp_path / "x", base)
    file = folder / lora_loader.WEIGHTS
    tensors = dict(load_file(file))
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointRefused, match=what) as caught:
        load(base, {"x": folder})
    assert str(file) in str(caught.value)


def test_broken_folders_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """A folder without its files, a truncated file, an invalid config."""
    base = checkpoint("tiny-llama")
    with pytest.raises(CheckpointRefused, match=r"has no adapter_config\.json"):
        lora_loader.read("x", tmp_path / "nowhere")
    folder = make_adapter(tmp_path / "x", base)
    whole = (folder / lora_loader.WEIGHTS).read_bytes()
    (folder / lora_loader.WEIGHTS).write_bytes(whole[:-1])
    with pytest.raises(CheckpointRefused, match="download it again"):
        lora_loader.read("x", folder)
    (folder / lora_loader.WEIGHTS).unlink()
    with pytest.raises(CheckpointRefused, match=r"has no adapter_model\.safetensors"):
        lora_loader.read("x", folder)
    for type in (b"F99", b"C64"):  # the first is no type of safetensors
        (folder / lora_loader.WEIGHTS).write_bytes(whole.replace(b"F32", type, 1))
        with pytest.raises(CheckpointRefused, match="safetensors"):
            lora_loader.read("x", folder)
    with pytest.raises(CheckpointRefused, match="cannot be read: File name too long"):
        lora_loader.read("x", tmp_path / ("x" * 300))
    (folder / lora_loader.WEIGHTS).write_bytes(whole)
    (folder / lora_loader.CONFIG).write_text(json.dumps({"r": 4, "lora_alpha": 4}))
    with pytest.raises(CheckpointRefused, match="names no peft_type"):
        lora_loader.read("x", folder)


def test_layers_that_see_no_packed_rows_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Latent attention expands the past sequence by sequence: its rows are not rows of the step."""
    base = checkpoint("tiny-deepseek-v3")
    with pytest.raises(CheckpointRefused, match="kv_b_proj does not see the tokens row by row"):
        load(base, {"x": make_adapter(tmp_path / "x", base, layers=("kv_b_proj",))})
    assert load(base, {"y": make_adapter(tmp_path / "y", base, layers=("o_proj", "q_b_proj"))}).lora is not None
