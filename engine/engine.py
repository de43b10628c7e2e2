"""One model on one device: tokens in, tokens out. Knows no network.

    add(sequence) ──▶ step() ──▶ [Progress, ...] ──▶ step() ──▶ ... until Progress.finish
                        │
                        ├── ahead.waiting()       on CUDA: a decode step that is queued already takes the place of these
                        ├── scheduler.plan()      which sequences, how many tokens each, blocks for all of them
                        ├── speculation           drafts behind a sequence's last token, where that pays
                        ├── forward()             one packed forward, captured or not
                        └── choose()              a token for every sequence that caught up, and one more for each
                                                  draft that was right; masks were filled meanwhile

A prefill worker adds sequences with `handoff` and a limit of one new token: they keep their blocks until `drop`. A
decode worker reserves blocks (`reserve`), lets the KV arrive in them, and then `join`s the sequence with `num_computed`
already at the prompt's length. They do not differ otherwise.

Not thread-safe: everything here runs on the engine's own thread (engine/engine_thread.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from engine.attention.forward_context import Batch, device_done, out_of_memory
from engine.core.block_pool import BlockPool
from engine.core.engine_config import EngineConfig
from engine.core.progress import Progress
from engine.core.scheduler import Chunk, Scheduler
from engine.core.sequence import Sequence
from engine.core.step_retries import BeforeStep, Retries
from engine.core.step_time import PROMPTS_S, StepTime
from engine.decoding.grammars import Grammars
from engine.decoding.new_tokens import Run, append_chosen
from engine.decoding.no_token import not_finite
from engine.decoding.sampler import score_prompt
from engine.decoding.speculative import Speculation
from engine.decoding.structured_output import Filling, Masks
from engine.kernels import speed_check
from engine.kv.kv_cache import KvCache
from engine.run_ahead import Flight, RunAhead
from engine.runner.captured_steps import Capture, Decode, Uncapturable
from engine.runner.model_runner import ModelRunner
from engine.runner.sequence_states import SequenceStates
from tandem.errors import Busy, InternalError, StepFailed, TandemError, TooLarge

log = logging.getLogger(__name__)
PROOF = "proof of the engine"  # owner of a block, and of a state slot, for one step


class Engine:
    def __init__(
        self,
        model: ModelRunner,
        config: EngineConfig,
        *,
        pace: StepTime | None = None,
        speculation: Speculation | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.model, self.ranks, self.config = model, model.ranks, config
        self.products: speed_check.Report | None = None  # set by build_engine
        self.vocabulary = ""  # likewise: a digest of what its token ids mean; "": not known
        self.pace = pace or StepTime()
        self.alone_s = PROMPTS_S  # longest step without streams; the worker may shorten it
        self.speculation = speculation
        self.pool = BlockPool(config.num_blocks, config.block_size)
        blocks, each = config.num_blocks + config.spare_block, config.block_size
        self.pages: KvCache = model.allocate(blocks, each, slots=config.max_running + 1)  # the last one is for PROOF
        self.states = states = SequenceStates(self.pages, self.pool) if self.pages.states else None
        self.state_blocks = states.blocks if states else 0  # with a copy of the state in a handoff
        assert not (states and speculation), "drafts would change recurrent states, and nothing takes them back"
        self.spare = config.num_blocks if config.spare_block else None  # that block's id
        self.decode: Decode | None = None  # set by `capture`
        self.scheduler = Scheduler(self.pool, states, token_budget=config.token_budget, max_running=config.max_running)
        self.ahead = RunAhead(self.scheduler, model, self.forward, drafts=speculation is not None)
        self.sequences: dict[str, Sequence] = {}  # everything that may own blocks: running, waiting, reserved, held
        self.steps = self.failures = 0
        self.stepped = False  # the recurrent states are already those after the current step
        self.streams = self.prompt_tokens = 0  # in the last step
        self.plan: list[Chunk] = []  # of the current or last step
        self.retries = Retries(config.token_budget)
        self.grammars = grammars
        self.masks = Masks(grammars.left_behind if grammars else None)

    def capture(self, how: Capture | None = None) -> str:
        """Captures steps of single tokens if they prove correct; returns a line about it. Call it before the first
        sequence, whose blocks it would overwrite."""
        assert self.spare is not None, "the engine was made without a spare block"
        assert not self.sequences, "a sequence has blocks already"
        most = self.scheduler.max_running
        try:
            self.decode = Decode(self.model, self.pages, spare=self.spare, max_running=most, capture=how)
        except Uncapturable as error:
            return f"not captured: {error}"
        return f"captured for {', '.join(map(str, self.decode.sizes))} sequences"

    # ---- sequences

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence, which is computed from its first missing token. Raises TooLarge if it can never fit."""
        self._enter(sequence)
        self.scheduler.add(sequence)

    def reserve(self, sequence: Sequence, ahead: int, arrives: bool = True) -> None:
        """Reserves blocks for all its tokens and `ahead` more; if KV `arrives` from another worker, the last ones are
        for a copy of recurrent states.

        `sequence.cached` tokens are in this worker's prefix cache and need not arrive. Raises Busy if there is no room
        now, TooLarge if it can never fit.
        """
        if len(self.sequences) >= self.scheduler.max_running:
            raise Busy(f"all {self.scheduler.max_running} places are taken", reason="NO_ROOM")
        self._enter(sequence)
        wanted = min(len(sequence.tokens) + ahead, sequence.max_len)
        blocks = self.pool.blocks_for(wanted) + (self.state_blocks if arrives else 0)
        hashes: list[bytes] | None = sequence.reusable(self.pool.block_size)
        if not self.scheduler.may_reserve(blocks):
            hashes = None
        elif self.states and not arrives:
            hashes = self.states.resume(sequence, blocks)
        reused = None if hashes is None else self.pool.take(sequence.id, hashes, blocks)
        if reused is None:
            self.drop(sequence.id)
            raise Busy(f"needs {blocks} blocks, {self.scheduler.reservable} are available", reason="NO_ROOM")
        sequence.cached = sequence.num_computed = reused * self.pool.block_size

    def join(self, sequence: Sequence, first_token: int | None) -> None:
        """Lets a reserved sequence run. With `first_token`, which does not end it, its blocks now hold the KV of all
        its tokens, followed by a copy of its recurrent states."""
        if first_token is not None:
            sequence.num_computed = len(sequence.tokens)
            self._publish(sequence, sequence.cached)  # blocks that it reused are published, or were distrusted since
            sequence.append(first_token)
        self.scheduler.add(sequence)
        if self.states and first_token is not None:
            self.states.load(sequence.id, self.pool.table(sequence.id))
            self.pool.shorten(sequence.id, self.states.blocks)

    def drop(self, sequence_id: str) -> None:
        """Ends a sequence in any state and frees its blocks and slots. Ignores unknown ids, because their sequences
        have ended."""
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is None:
            return
        self.scheduler.remove(sequence)
        self.ahead.leave(sequence)
        if self.speculation:
            self.speculation.forget(sequence_id)
        if self.pool.owns(sequence_id):
            self.pool.drop(sequence_id)
        if self.states:
            self.states.slots.drop(sequence_id)

    # ---- the step

    @property
    def has_work(self) -> bool:
        """Whether a step could do something; a queued step holds blocks until it has landed."""
        return self.scheduler.has_work or self.ahead.flight is not None

    def step(self) -> list[Progress]:
        """Runs one packed forward over the sequences that the scheduler chooses, or waits for the queued one. Empty if
        nothing could run, or if the step failed and will be retried (`retries`). Raises if the engine's state can no
        longer be trusted."""
        flight = self.ahead.waiting()
        plan = self.plan = flight.plan if flight else self._plan()
        if not plan:
            return []
        self.stepped = False
        self.streams = sum(chunk.tokens == 1 for chunk in plan)
        self.prompt_tokens = sum(chunk.tokens for chunk in plan) - self.streams
        started = self.speculation.clock() if self.speculation else 0.0
        before = [BeforeStep(sequence) for sequence, _ in plan]
        drafts: list[list[int]] = [[] for _ in plan]
        filling: Filling | None = None
        try:
            if flight or self.ahead.takes(plan):
                progress = self._land(flight or self.ahead.launch(plan))
            else:
                if self.speculation:
                    drafts = self.speculation.drafts(plan, self.scheduler, self.retries.tokens)
                ready = [chunk.sequence for chunk in plan if chunk.tokens == chunk.sequence.num_uncomputed]
                filling = self.masks.begin(ready, self.model.vocab_size)
                logits = self.forward(self._pack(plan, drafts))  # [rows wanted, vocab]
                progress = self._advance(plan, drafts, logits, filling)
        except (AssertionError, TandemError):  # the engine's bookkeeping is wrong
            raise
        except Exception as error:
            log.exception("a step of %d sequences failed", len(plan))
            if filling is not None:
                filling.wait()  # the masks' thread reads the sequences
            return self._failed(plan, sum(map(len, drafts)), before, error)
        self.steps += 1
        self.retries.succeeded()
        if self.speculation:
            self.speculation.took(plan, [len(draft) for draft in drafts], self.speculation.clock() - started)
        return progress

    # ---- a step that failed

    def _plan(self) -> list[Chunk]:
        alone = self.pace.prompt_tokens_alone(self.alone_s)
        while part := self.retries.next(self.sequences):
            if plan := self.scheduler.plan(self._beside, alone, part.tokens, part.ids):
                return plan
        for _ in range(2):  # the turn of prompts that find no room passes on
            turn = self.retries.turn(self.scheduler.running, self.scheduler.waiting)
            plan = self.scheduler.plan(self._beside, alone, self.retries.tokens, turn)
            if plan or turn is None:
                return plan
        # A stream that finds no room leaves its turn empty, too. An empty plan makes the thread sleep until a call.
        return self.scheduler.plan(self._beside, alone, self.retries.tokens)

    def _failed(self, plan: list[Chunk], drafts: int, before: list[BeforeStep], error: Exception) -> list[Progress]:
        """Retries the sequences of a failed step in smaller steps; a sequence that fails alone ends.

        A failed forward may have written beyond `num_computed` of its sequences, which is never read and which the next
        step overwrites. Raises `error` if any other state may be wrong.
        """
        self.failures += 1
        tokens, no_memory = sum(chunk.tokens for chunk in plan) + drafts, out_of_memory(error)
        if self.model.device.type == "cuda":  # not yet run on a GPU
            torch.cuda.synchronize(self.model.device)  # raises the error again if it has ended the device's context
        self.ahead.abandon()
        if faults := self.check():
            log.error("after a failed step the ledger does not balance: %s", "; ".join(faults))
            raise error
        if self.stepped:  # the states cannot be rolled back
            raise error
        for sequence, _ in plan:
            if self.speculation:
                self.speculation.forget(sequence.id)
        if not all(each.restore() for each in before):  # some took tokens that were never reported
            ended = [self._give_up(sequence, error, alone=False) for sequence, _ in plan]
        elif self.retries.failed([chunk.sequence.id for chunk in plan], tokens, no_memory):
            ended = [self._give_up(plan[0].sequence, error, alone=True)]
        else:
            return []
        self._prove(error)
        return ended

    def _give_up(self, sequence: Sequence, error: Exception, *, alone: bool) -> Progress:
        self._distrust(sequence)
        if alone and out_of_memory(error):
            why: TandemError = TooLarge("a step with this request alone runs out of memory", reason="OUT_OF_MEMORY")
        else:
            why = StepFailed(f"the engine's step with this request failed: {type(error).__name__}")
        self._end(sequence, why)
        return Progress(sequence, sequence.num_computed, None, None, error=why)

    def _prove(self, error: Exception) -> None:
        """Whether the engine can still compute: one token in a free block. Raises `error` if not."""
        if self.pool.take(PROOF, [], 1) is None:  # every block is held: the running sequences will show it
            return
        try:
            table = list(self.pool.table(PROOF))
            self.forward(Batch([0], [0], [1], [1], [table], [0], slots=[self.config.max_running])).cpu()
        except Exception as again:
            log.exception("the engine's test step fails, too")
            raise error from again
        finally:
            self.pool.drop(PROOF)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits `[rows wanted, vocab]` of one packed forward, by the captured step if there is one, valid until the
        next call; writes the pages."""
        logits = self.decode.logits(batch) if self.decode else None
        return self.model.forward(self.pages, batch) if logits is None else logits

    # ---- inside

    def _beside(self, streams: int) -> int | None:
        """The maximum number of prompt tokens in a step with this many streams."""
        stretch = self.config.stretch
        return self.pace.prompt_tokens_beside(streams, stretch, self.config.beside_s) if stretch else None

    def check(self, live: Iterable[str] | None = None) -> list[str]:
        """One sentence for each inconsistency of the ledgers of blocks and of state slots. `live`: as in the pool."""
        faults = self.pool.check(None if live is None else [*live, *self.ahead.owners])
        if self.states:
            faults += self.states.check([each.id for each in self.scheduler.running], self.sequences)
        return faults

    def _enter(self, sequence: Sequence) -> None:
        if sequence.id in self.sequences:
            raise ValueError(f"{sequence.id} is already in the engine")
        if sequence.adapter is not None and self.model.lora is None:
            raise ValueError(f"{sequence.id} has an adapter, the model has none")
        longest = (self.pool.total - self.state_blocks) * self.pool.block_size
        longest = min(longest, self.model.max_model_len)  # in a pool with unequal limits the router asks the others
        if sequence.max_len > longest:
            what = f"prompt and max_tokens are {sequence.max_len} tokens, this worker takes {longest}; ask for fewer"
            raise TooLarge(what, field="max_tokens", bound=f"prompt + max_tokens <= {longest}")
        self.sequences[sequence.id] = sequence

    def _pack(self, plan: list[Chunk], drafts: list[list[int]]) -> Batch:
        """Concatenates the chunks, each with its drafts. Each chunk's logits are computed, in this order, at scored
        prompt tokens, at its last token if the chunk completes the sequence's tokens, and at every draft."""
        batch = Batch()
        for (sequence, count), draft in zip(plan, drafts, strict=True):
            start, end = sequence.num_computed, sequence.num_computed + count
            wanted = [position - start for position in sequence.to_score(count)]
            if end == len(sequence.tokens):
                wanted += range(count - 1, count + len(draft))
            batch.add(sequence.tokens[start:end] + draft, start, self.pool.table(sequence.id), wanted)
            if self.model.lora is not None:
                batch.adapters.append(self.model.lora.slot_of(sequence.adapter))
            if self.states:
                batch.slots.append(self.states.slots.slot(sequence.id))
        return batch

    def _advance(
        self, plan: list[Chunk], drafts: list[list[int]], logits: torch.Tensor, filling: Filling | None
    ) -> list[Progress]:
        """Applies the result of the forward. `logits` is [rows wanted, vocab], in the order of `_pack`."""
        progress: list[Progress] = []
        runs: list[Run] = []
        before = [sequence.num_computed for sequence, _ in plan]
        row = 0
        for (sequence, count), draft in zip(plan, drafts, strict=True):
            error: TandemError | None = None
            if scored := sequence.to_score(count):
                error = score_prompt(sequence, scored, logits[row : row + len(scored)])
                row += len(scored)
            caught_up = count == sequence.num_uncomputed
            sequence.num_computed += count
            if caught_up:
                runs.append(Run(sequence, draft, row, error))
                row += 1 + len(draft)
            else:
                progress.append(Progress(sequence, sequence.num_computed, None, None, error=error))
        progress += append_chosen(runs, logits, filling, self.speculation, compiled=self.model.draws_compiled)
        # From here on, transfers may read these blocks, or write to freed ones, outside the device's queue. The wait
        # also makes the measured seconds those of the device. No step waits twice, because reading a token back has
        # already waited.
        device_done(self.model.device)
        self.stepped = self.states is not None and self.states.commit()
        for (sequence, count), start in zip(plan, before, strict=True):
            self._publish(sequence, start)
            if self.states:
                self.states.keep(sequence, count)
        self._end_all(progress)
        return progress

    def _land(self, flight: Flight) -> list[Progress]:
        """Queues the step after this one, then waits for this one's tokens and applies them."""
        self.ahead.launch_behind(flight)
        tokens = self.ahead.land(flight)
        progress: list[Progress] = []
        for sequence, row in flight.rows.items():
            sequence.num_computed += 1
            if (token := tokens[row]) >= 0:
                finish = sequence.append(token)
                progress.append(Progress(sequence, sequence.num_computed, token, finish))
            else:
                progress.append(Progress(sequence, sequence.num_computed, None, None, error=not_finite(sequence)))
            self._publish(sequence, sequence.num_computed - 1)
        self._end_all(progress)
        return progress

    def _end_all(self, progress: list[Progress]) -> None:
        for sequence, _, _, finish, _, error in progress:
            if isinstance(error, InternalError):
                self._distrust(sequence)
            if finish is not None or error is not None:
                self._end(sequence, error)

    def _distrust(self, sequence: Sequence) -> None:
        self.pool.distrust(sequence.id)
        if self.states:
            self.states.forget(sequence)

    def _end(self, sequence: Sequence, error: TandemError | None = None) -> None:
        """Removes the sequence from the batch; the blocks of a hand-off stay until drop(), with a copy of its recurrent
        states."""
        if sequence.handoff:
            if self.states and error is None:
                self.states.save(sequence.id, self.pool.table(sequence.id))
            self.scheduler.remove(sequence)
        else:
            self.drop(sequence.id)

    def _publish(self, sequence: Sequence, before: int) -> None:
        """Publishes the blocks that became full between `before` and `sequence.num_computed` for reuse."""
        if sequence.rounded:
            return
        size, hashes = self.pool.block_size, sequence.hashes(self.pool.block_size)
        for index in range(before // size, sequence.num_computed // size):
            self.pool.publish(sequence.id, index, hashes[index])
