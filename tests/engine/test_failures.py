"""What a log line says of an error."""

from __future__ import annotations

import pytest
import torch
from torch.jit import _get_trace_graph  # type: ignore[attr-defined]

from engine.runner.failures import reason

CUDA = (
    "CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors might be asynchronously reported"
)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError(CUDA), CUDA.partition("\n")[0]),
        (RuntimeError(f"at\nf.py(3): f\nRuntimeError: torch.AcceleratorError: {CUDA}\n\nAt:\n  f.py(3): f"), CUDA),
        (AttributeError("'_Recorded' object has no attribute 'batch'"), "'_Recorded' object has no attribute 'batch'"),
        (ValueError(), "ValueError"),
    ],
)
def test_the_line_that_says_why_is_found(error: Exception, why: str) -> None:
    """Before what follows it, behind what precedes it; without one, the kind of error."""
    assert reason(error) == why.partition("\n")[0]


def test_a_recorded_step_that_fails_says_why() -> None:
    """TorchScript's own words, which begin with a sentence that is always the same."""
    graph, _ = _get_trace_graph(lambda x, y: x + y, (torch.zeros(3), torch.zeros(3)))  # type: ignore[no-untyped-call]
    step = torch._C._create_function_from_graph("step", graph)
    with pytest.raises(RuntimeError, match="failed in the TorchScript interpreter") as caught:
        step(torch.zeros(3), torch.zeros(4))
    assert reason(caught.value).startswith("The size of tensor a (3) must match the size of tensor b (4)")
