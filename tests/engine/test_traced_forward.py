"""The recorded step: only what is the same for every batch is recorded, and it is proven before it serves.

That it gives the tokens of the modules, and for which families, is what test_models.py and test_exactness.py show: they
run it by default.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import kernels
from engine.loading.model_loader import load_model
from engine.runner import graph_fusion, traced_forward
from engine.runner.model_runner import ModelRunner

CPU = torch.device("cpu")

built = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)


def load(folder: Path) -> ModelRunner:
    return load_model(str(folder), dtype=torch.float32, device=CPU)


def by_value(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


def by_size(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[1] > 11 else x


def by_number(x: torch.Tensor) -> torch.Tensor:
    return x * int(x.abs().max())


def by_list(x: torch.Tensor) -> torch.Tensor:
    return x * max(each for row in x[0, :, 0].tolist() for each in [row])


@built
@pytest.mark.parametrize("depends", [by_value, by_size, by_number, by_list])
def test_what_depends_on_the_batch_in_python_is_refused(depends: Any, checkpoint: Callable[[str], Path]) -> None:
    """A branch or a number taken from the batch would be a constant: such a model runs by its modules, and says why."""
    model = load(checkpoint("tiny-llama"))
    assert model.recorded is not None
    model.recorded = None
    layer: Any = model.module.model.layers[1].mlp
    plain = layer.forward
    layer.forward = lambda x: plain(depends(x))
    assert "cannot be recorded" in traced_forward.install(model)
    assert model.recorded is None
    layer.forward = plain
    assert traced_forward.install(model) == "recorded"


@built
def test_a_recording_that_differs_does_not_serve(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit in one logit of one batch is enough."""
    model, real = load(checkpoint("tiny-llama")), traced_forward.run

    def wrong(replay: Any, step: Any, wanted: torch.Tensor) -> torch.Tensor:
        logits = real(replay, step, wanted)
        if len(wanted) == 1:
            logits[0, 7] = torch.nextafter(logits[0, 7], logits[0, 7] + 1)
        return logits

    monkeypatch.setattr(traced_forward, "run", wrong)
    with pytest.raises(traced_forward.Unrecordable, match="differs"):
        traced_forward.record(model)


@built
def test_a_recording_ends_with_its_model(checkpoint: Callable[[str], Path]) -> None:
    """It holds weights, which must be freed with the model."""
    model = load(checkpoint("tiny-llama"))
    assert model.recorded is not None
    held = [weakref.ref(parameter) for parameter in model.module.parameters()]
    del model
    gc.collect()
    assert not any(one() is not None for one in held)


# ---- fused operators


def nodes_of(model: ModelRunner) -> list[str]:
    """The kinds of the recording's operators, in order."""
    recorded: Any = model.recorded
    return [node.kind() for node in recorded.args[0].graph.nodes()]


def kinds(model: ModelRunner) -> Counter[str]:
    return Counter(nodes_of(model))


@built
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_neighbours_are_done_together(family: str, checkpoint: Callable[[str], Path]) -> None:
    """Projections of the same rows, rotated heads, sums and gates are one operator each, wherever a model has them."""
    model = load(checkpoint(f"tiny-{family}"))
    found, layers = kinds(model), len(model.facts)
    assert found["tandem::rotate"] == 2 * layers
    assert found["tandem::linears"] >= layers
    assert not found["aten::neg"]
    assert not found["aten::silu"]
    if family in ("llama", "qwen3"):  # gemma2 has a norm before its sums
        assert found["tandem::linear_add"] == 2 * layers
        assert found["tandem::linears"] == found["tandem::linears_gated"] == layers
        assert found["tandem::linear"] == 1
        assert not found["tandem::gated"]


@built
def test_quantised_neighbours_are_done_together(checkpoint: Callable[[str], Path]) -> None:
    """As those of plain weights, and after the last attention only for rows with logits."""
    model = load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=torch.device("cpu"), weights="int8")
    found, layers = kinds(model), len(model.facts)
    assert found["tandem::linear_codes_add"] == 2 * layers
    assert found["tandem::linears_codes"] == found["tandem::linears_codes_gated"] == layers
    assert found["tandem::linear_codes"] == 1
    nodes = nodes_of(model)
    behind = nodes[len(nodes) - nodes[::-1].index("tandem::attend") :]
    assert behind.index("aten::index") < behind.index("tandem::linears_codes_gated")


@built
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_rows_without_logits_end_at_the_last_attention(family: str, checkpoint: Callable[[str], Path]) -> None:
    """A token without logits is not needed after it: the rest of the last layer has only the other rows."""
    nodes = nodes_of(load(checkpoint(f"tiny-{family}")))
    behind = nodes[len(nodes) - nodes[::-1].index("tandem::attend") :]
    assert behind.count("aten::index") == 2  # of attention's output, and of the residual
    assert behind.index("aten::index") < behind.index("tandem::rms_norm")
    assert behind.index("aten::index") < behind.index("tandem::linears_gated")


@built
def test_a_wrong_rule_costs_speed_and_no_token(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the rules make is verified like the recording: here they mistake each function for another."""
    expected = kinds(load(checkpoint("tiny-gemma2")))
    assert expected["tandem::linears_gated"]
    monkeypatch.setattr(graph_fusion, "GELUS", {"tanh": "gelu"})
    found = kinds(load(checkpoint("tiny-gemma2")))
    assert found["aten::gelu"]
    assert not found["tandem::linears_gated"]
    assert "the fused recording cannot be used" in caplog.text
