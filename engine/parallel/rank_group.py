"""The group of a model's ranks, from one rank's view: processes of one host that each hold a part of every layer.

All ranks run the same forward over the same batch and meet in `torch.ops.tandem.all_reduce` and `all_gather`
(engine/kernels/collectives.cpp), over memory that they share. A rank that dies, stops or loses step breaks the group:
the calls of all ranks raise, within two seconds, and the group never works again.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from engine.kernels import CPU, REFERENCE, serving
from tandem.errors import CheckpointRefused, SettingsError

STEP_END, AGREEMENT, TURN = 0, -1, -2  # sites without a module; those of modules count from 1
DIGEST_BYTES = 16
LARGE_PAGE = 2 << 20


class RankGroup:
    """`rank` of `size`. `memory` is a file of `group_memory(size)`, the same for all ranks."""

    def __init__(self, rank: int, size: int, memory: int) -> None:
        self.rank, self.size = rank, size
        self.number: int = torch.ops.tandem.open_group.default(memory, rank, size)

    def all_reduce(self, x: torch.Tensor, site: int) -> torch.Tensor:
        """The sum of every rank's `x`, the same bits on each. `site` identifies the call within a forward."""
        out: torch.Tensor = torch.ops.tandem.all_reduce.default(x, self.number, site)
        return out

    def all_gather(self, x: torch.Tensor, site: int) -> torch.Tensor:
        """Every rank's `x` `[..., n]` side by side: `[..., size * n]`."""
        out: torch.Tensor = torch.ops.tandem.all_gather.default(x, self.number, site)
        return out

    def end_step(self) -> None:
        """Returns when every rank has written all of its KV of this step. Raises RuntimeError if the group breaks."""
        torch.ops.tandem.group_barrier.default(self.number, STEP_END)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Ranks enter one after another. Raises RuntimeError if an earlier rank fails inside."""
        for _ in range(self.rank):
            torch.ops.tandem.group_barrier.default(self.number, TURN)
        yield
        for _ in range(self.rank, self.size):
            torch.ops.tandem.group_barrier.default(self.number, TURN)

    def agree(self, digest: bytes, what: str) -> None:
        """Raises CheckpointRefused unless all ranks call it with the same digest of DIGEST_BYTES."""
        all_ranks = self.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8), AGREEMENT)
        if not (all_ranks.view(self.size, DIGEST_BYTES) == all_ranks[:DIGEST_BYTES]).all():
            raise CheckpointRefused(f"the {self.size} ranks of a worker do not have the same {what}")

    def all_say(self, yes: bool) -> bool:
        """Whether every rank passes True; returns when all have called it."""
        said = self.all_gather(torch.tensor([yes], dtype=torch.uint8), AGREEMENT)
        return bool(said.all().item())

    def beats(self) -> list[int]:
        """Each rank's count of signs of life: one every 50 ms while its process runs."""
        counts: list[int] = torch.ops.tandem.group_beats.default(self.number)
        return counts

    @property
    def broken(self) -> bool:
        """Whether a rank has broken the group, or has found another one lost."""
        broken: bool = torch.ops.tandem.group_broken.default(self.number)
        return broken

    def break_off(self) -> None:
        """Makes every waiting and later call of all ranks raise. Safe on any thread, and after `close`."""
        with suppress(RuntimeError):
            torch.ops.tandem.break_group.default(self.number)

    def close(self) -> None:
        """Breaks the group and gives its memory back. Repeatable."""
        with suppress(RuntimeError):
            torch.ops.tandem.close_group.default(self.number)


def group_memory(size: int) -> int:
    """A file for the groups of `size` ranks. Raises SettingsError where ranks cannot be served."""
    if serving(CPU) == REFERENCE:
        raise SettingsError(
            "a worker of several ranks needs the compiled operators (`python -m engine.kernels.build`)",
            field="decode_tp",
            bound="1 without them",
        )
    return shared_file(torch.ops.tandem.group_bytes.default(size))


def shared_file(nbytes: int) -> int:
    """An anonymous file in memory; it is gone when the last process that has it open or mapped has ended."""
    if not hasattr(os, "memfd_create"):
        raise SettingsError("a worker of several ranks needs Linux", field="decode_tp", bound="1 on this system")
    file = os.memfd_create("tandem-ranks", os.MFD_CLOEXEC)
    try:
        os.truncate(file, nbytes)
    except OSError:
        os.close(file)
        raise
    return file


def mapped(file: int, nbytes: int) -> torch.Tensor:
    """The content of such a file, uint8 `[nbytes]`, in large pages where the system has them for it. Mapped while the
    tensor lives."""
    memory = mmap.mmap(file, nbytes)
    if nbytes >= LARGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system has none for shared memory
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
