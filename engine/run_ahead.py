"""Decode steps that are queued on the device before the host has seen the tokens of the step before them.

    host     queue n+1 │ wait for n │ append, publish, tell, answer calls │ queue n+2 │ wait for n+1 │ ...
    device   ── step n ──────────────▶│── step n+1 ───────────────────────────────────▶│── step n+2 ──

A *flight* is a queued decode step. Each of its sequences gets one token, which depends only on logits, seed and
position. The next flight reads these tokens on the device, so its results have the same bits as a step that is planned
after the host has read them. The next flight is queued only if the scheduler would plan exactly this batch: no sequence
waits, every running sequence is in the current flight, and each gets a free or cached block.

Sequences that reach their length limit are left out of the next flight. A sequence that has ended at a stop token, or
is dropped meanwhile, leaves `rows`, and its result is discarded. All other steps run on the engine's waiting path once
the flight has landed: nothing is admitted or preempted while a flight is queued.

**A flight owns the blocks that it writes**, one for each row, in addition to their sequences. So a sequence may be
dropped at any time: no block becomes free while the device may still write to it. Blocks in the prefix cache are full,
and a flight never writes to them.

Only on CUDA, where the device computes while the host does something else; on CPU one thread does both.
tests/engine/test_run_ahead.py runs it on a stand-in that computes as late as it may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from engine.attention.forward_context import Batch, device_done, done_behind, on_device
from engine.core.scheduler import Chunk, Scheduler
from engine.core.sequence import Sequence
from engine.decoding.sampler import draw
from engine.runner.model_runner import ModelRunner
from tandem.sampling import Sampling


class Tokens:
    """The tokens of a queued step: on the device for the next step, and on their way to the host."""

    def __init__(self, chosen: torch.Tensor) -> None:
        """`chosen` is int64 [rows], -1 where no token is possible."""
        self.on_device = chosen.clamp(min=0)  # there is no embedding of -1: reading it would end the device's context
        self._host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=chosen.is_cuda)
        self._host.copy_(chosen, non_blocking=True)
        self._wait = done_behind(chosen.device)

    def read(self) -> list[int]:
        """Waits for this step, not for later ones."""
        self._wait()
        tokens: list[int] = self._host.tolist()
        return tokens


@dataclass
class Flight:
    owner: str  # of the blocks that it writes
    rows: dict[Sequence, int]  # of `tokens`; without the sequences that have left
    tokens: Tokens

    @property
    def plan(self) -> list[Chunk]:
        return [Chunk(sequence, 1) for sequence in self.rows]


class RunAhead:
    def __init__(
        self, scheduler: Scheduler, model: ModelRunner, forward: Callable[[Batch], torch.Tensor], *, drafts: bool
    ) -> None:
        alone = model.device.type == "cuda" and model.size == 1
        # Recurrent states, drafts and adapters' slots are the host's to change between two steps.
        self.on = alone and scheduler.states is None and not drafts and model.lora is None
        self.flight: Flight | None = None  # the last one, if it has not landed
        self.owners: list[str] = []  # of blocks: the flights that have not landed, at most two
        self._scheduler, self._pool = scheduler, scheduler.pool
        self._model, self._forward = model, forward
        self._launched = 0

    def takes(self, plan: list[Chunk]) -> bool:
        """Whether this step can be a flight."""
        return self.on and all(
            sequence.num_uncomputed == 1 and not sequence.handoff and _plain(sequence.sampling) for sequence, _ in plan
        )

    def waiting(self) -> Flight | None:
        """The flight to land next. A flight without sequences lands here, which raises the device's errors."""
        if self.flight is not None and not self.flight.rows:
            self.land(self.flight)
            self.flight = None
        return self.flight

    def launch(self, plan: list[Chunk]) -> Flight:
        """Queues a step whose tokens the host knows."""
        return self._launch([sequence for sequence, _ in plan])

    def launch_behind(self, flight: Flight) -> None:
        """Queues the step after `flight`, which has not landed, if that step can be planned now."""
        self.flight = None
        going = [sequence for sequence in flight.rows if len(sequence.tokens) + 1 < sequence.max_len]
        alone = not self._scheduler.waiting and len(self._scheduler.running) == len(flight.rows)
        if going and alone and all(self._grow(sequence) for sequence in going):
            self.flight = self._launch(going, flight)

    def land(self, flight: Flight) -> list[int]:
        """Waits for its tokens; -1 where none is possible."""
        tokens = flight.tokens.read()
        self.owners.remove(flight.owner)
        self._pool.drop(flight.owner)
        return tokens

    def leave(self, sequence: Sequence) -> None:
        """The sequence has ended: its results are discarded."""
        if self.flight is not None:
            self.flight.rows.pop(sequence, None)

    def abandon(self) -> None:
        """After a failure, discards all flights."""
        if self.owners:
            device_done(self._model.device)
        while self.owners:
            self._pool.drop(self.owners.pop())
        self.flight = None

    # ---- inside

    def _grow(self, sequence: Sequence) -> bool:
        """Takes a place for the token that the flight chooses."""
        return self._pool.grow(sequence.id, self._pool.blocks_for(len(sequence.tokens) + 1))

    def _launch(self, sequences: list[Sequence], behind: Flight | None = None) -> Flight:
        """Queues their next step, or with `behind` the step after that flight."""
        batch, written = Batch(), []
        for sequence in sequences:
            table, place = self._pool.table(sequence.id), sequence.num_computed + (behind is not None)
            batch.add([0 if behind else sequence.tokens[place]], place, table, [0])
            written.append(table[place // self._pool.block_size])
        self._launched += 1
        owner = f"flight {self._launched}"
        self._pool.share(owner, written)
        self.owners.append(owner)
        sampling = [sequence.sampling for sequence in sequences]
        fed = (behind.tokens, [behind.rows[sequence] for sequence in sequences]) if behind else None
        rows = {sequence: row for row, sequence in enumerate(sequences)}
        return Flight(owner, rows, self._queue(batch, sampling, fed))

    @torch.inference_mode()
    def _queue(self, batch: Batch, sampling: list[Sampling], fed: tuple[Tokens, Iterable[int]] | None) -> Tokens:
        """Forward and choice, without waiting. `fed`: the tokens that are the batch's own, and which of them."""
        if fed is not None:
            tokens, rows = fed
            batch.fed = tokens.on_device[on_device(rows, torch.int64, self._model.device)]
        return Tokens(draw(self._forward(batch), sampling, batch.context_lens, compiled=self._model.draws_compiled))


def _plain(sampling: Sampling) -> bool:
    """Whether a token depends only on logits, seed and position, and only the token is requested."""
    return not sampling.adjusts and sampling.grammar is None and sampling.logprobs is None
