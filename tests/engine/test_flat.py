"""The recorded step: only what is the same for every batch is recorded, and it is proven before it serves.

That it gives the tokens of the modules is what test_models.py and test_exactness.py show: they run it by default.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import flat, kernels
from engine.checkpoints import TINY
from engine.model import Model

CPU = torch.device("cpu")
LATENT = {"deepseek-v2", "deepseek-v3"}  # their context is expanded sequence by sequence, in Python

built = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)


def load(folder: Path) -> Model:
    return Model.load(str(folder), dtype=torch.float32, device=CPU)


@built
@pytest.mark.parametrize("family", sorted(TINY))
def test_which_families_are_recorded(family: str, checkpoint: Callable[[str], Path]) -> None:
    """All but those with latent pages."""
    assert (load(checkpoint(f"tiny-{family}")).recorded is None) == (family in LATENT)


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
    """A branch or a number taken from the batch would be held fast: such a model runs by its modules, and says why."""
    model = load(checkpoint("tiny-llama"))
    assert model.recorded is not None
    model.recorded = None
    layer: Any = model.module.model.layers[1].mlp
    plain = layer.forward
    layer.forward = lambda x: plain(depends(x))
    assert "cannot be recorded" in model.record()
    assert model.recorded is None
    layer.forward = plain
    assert model.record() == "recorded"


@built
def test_a_recording_that_differs_does_not_serve(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit in one logit of one batch is enough."""
    model, real = load(checkpoint("tiny-llama")), flat.trace

    def wrong(*args: Any, **kwargs: Any) -> Any:
        replay = real(*args, **kwargs)

        def run(wanted: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = replay(wanted, *tensors)
            if len(wanted) == 1:
                logits[0, 7] = torch.nextafter(logits[0, 7], logits[0, 7] + 1)
            return logits

        return run

    monkeypatch.setattr(flat, "trace", wrong)
    with pytest.raises(flat.Unrecordable, match="differs"):
        flat.record(model)
