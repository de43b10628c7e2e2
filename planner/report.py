"""The planner's result as a table, and as a dictionary for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.capacity import CHECKPOINT, Capacity, Shape, format_name
from planner.ranks import Fit

GIB, MIB = 2**30, 2**20


def facts(
    shape: Shape, capacity: Capacity, *, dtype: str, weights: str = CHECKPOINT, kv_dtype: str, link: float
) -> dict[str, Any]:
    """`link` in bytes per second."""
    per_token = shape.kv_bytes_per_token(dtype, kv_dtype)
    return {
        **asdict(shape),
        **asdict(capacity),
        "dtype": dtype,
        "weights_as": weights,
        "kv_dtype": kv_dtype,
        "kv_bytes_per_token": per_token,
        "state_bytes": shape.state_bytes(dtype),
        "transfer_seconds": {
            length: (length * per_token + shape.state_bytes(dtype)) / link for length in capacity.concurrency
        },
    }


def ranks_table(fits: Sequence[Fit], memory: int) -> RenderableType:
    """`memory` of one device, in bytes."""
    title = f"ranks of a worker, each on a device of {memory / GIB:g} GiB"
    found = Table("ranks", "weights on each", "KV on each", "tokens", title=title)
    for fit in fits:
        if fit.why_not:
            found.add_row(str(fit.ranks), Text(f"no: {fit.why_not}"), "", "")
        else:
            found.add_row(str(fit.ranks), f"{fit.weights / GIB:.2f} GiB", f"{fit.kv / GIB:.2f} GiB", f"{fit.tokens:,}")
    return found


def table(
    shape: Shape, capacity: Capacity, *, dtype: str, weights: str = CHECKPOINT, kv_dtype: str, link: float
) -> RenderableType:
    per_token, state = shape.kv_bytes_per_token(dtype, kv_dtype), shape.state_bytes(dtype)
    kept = dtype if kv_dtype == "auto" else f"{kv_dtype} and scales"
    head = Table.grid(padding=(0, 2))
    for name, value, why in (
        ("model", shape.name, f"{shape.parameters / 1e9:.2f} B parameters, {shape.layers} layers"),
        (
            "weights",
            f"{capacity.weights / GIB:.2f} GiB",
            f"as {format_name(dtype, weights)}; {shape.stored_bytes / GIB:.2f} GiB on disk"
            + (f"; {capacity.weights / shape.ranks / GIB:.2f} GiB in each of {shape.ranks} ranks" * (shape.ranks > 1)),
        ),
        ("adapters", f"{capacity.adapters / GIB:.2f} GiB", "slots with room for every layer but the head"),
        ("KV bytes per token", f"{per_token:,}", f"{shape.why}, {len(shape.calls)} layers, {kept}"),
        ("state per sequence", f"{state / MIB:.2f} MiB", _of_state(state, per_token, capacity, link)),
        ("KV pool", f"{capacity.kv / GIB:.2f} GiB", f"{capacity.blocks:,} blocks, {capacity.tokens:,} tokens"),
    ):
        if {"state per sequence": state, "adapters": capacity.adapters}.get(name, True):
            head.add_row(f"[bold]{name}[/bold]", value, f"[dim]{why}[/dim]")
    many = Table("context", "sequences at once", f"moves at {link / 1e9:g} GB/s in", title="how many fit")
    for length, count in capacity.concurrency.items():
        many.add_row(f"{length:,}", f"{count:,}", f"{(length * per_token + state) / link * 1e3:.1f} ms")
    longest = Table("sequences at once", "longest context of each", title="how long they may be")
    for count, length in capacity.longest.items():
        note = "  (the model's limit)" if length == shape.context else ""
        longest.add_row(f"{count:,}", f"{length:,}{note}")
    return Group(head, many, longest)


def _of_state(state: int, per_token: int, capacity: Capacity, link: float) -> str:
    like = f"as much as the KV of {state / per_token:,.0f} tokens, " if per_token else ""
    moves = f"{like}moves with every prompt in {state / link * 1e3:.1f} ms"
    return f"{moves}; slots take {capacity.state_slots / GIB:.2f} GiB"
