"""The weights of a mixture's experts, by their names and shapes in the files."""

from __future__ import annotations

from collections.abc import Iterator

MARK = ".experts."
OTHER = ".feed_forward.experts."  # Llama 4's, each of which multiplies every token: not in transformers' common form
Shapes = dict[str, tuple[int, ...]]


def matrices(shapes: Shapes) -> Iterator[tuple[int, int, int]]:
    """(experts, n, k) of each weight [n, k]: one expert's, or those of all in one tensor, as they are or transposed."""
    for name, shape in shapes.items():
        if MARK not in name or OTHER in name:
            continue
        if len(shape) == 2 and name.endswith(".weight"):
            yield 1, shape[0], shape[1]
        elif len(shape) == 3:
            experts, n, k = shape
            yield (experts, k, n) if _transposed(name, shapes) else (experts, n, k)


def _transposed(name: str, shapes: Shapes) -> bool:
    """Whether its tensors are [experts, in, out]. The product down has as many outputs as those up have inputs."""
    siblings = {each: shape for each, shape in shapes.items() if each.startswith(name.rpartition(".")[0] + ".")}
    down = next((shape for each, shape in siblings.items() if "down" in each and len(shape) == 3), None)
    up = next((shape for each, shape in siblings.items() if "up" in each and len(shape) == 3), None)
    return down is not None and up is not None and up[2] != down[1] and up[1] == down[2]
