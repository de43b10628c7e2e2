"""Facts about the served model, from the records of the decode workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.state.registry import State
from services.worker_liveness import WorkerLiveness
from tandem.errors import NoWorker


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a request is validated against."""

    name: str
    context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    adapters: tuple[str, ...] = ()
    layout_hash: str = ""  # of the KV: differs for another checkpoint or another dtype


class ServedModel:
    def __init__(self, view: WorkerLiveness, adapters: Iterable[str]) -> None:
        self._view = view
        self._adapters = tuple(adapters)
        self._facts: ModelFacts | None = None
        self._read_from: object = None  # the view's workers that the facts were read from

    def facts(self) -> ModelFacts:
        """The last known facts while no decode worker is present. Raises NoWorker before the first one is."""
        if self._read_from is self._view.workers and self._facts:
            return self._facts
        self._read_from = self._view.workers
        records = self._view.of_role("decode")
        if records:
            longest = max(records, key=lambda record: record.max_model_len)
            self._facts = ModelFacts(
                name=longest.model,
                context=longest.max_model_len,
                vocab_size=longest.vocab_size,
                eos_token_ids=tuple(longest.eos_token_ids),
                adapters=self._adapters,
                layout_hash=longest.layout_hash,
            )
        if self._facts is None:
            raise NoWorker("no decode worker has started yet; `tandem workers` shows the pools", retry_after=2.0)
        return self._facts

    def layouts(self) -> set[str]:
        """The KV layouts of the decode workers that are present."""
        return {record.layout_hash for record in self._view.of_role("decode")}

    def ready(self) -> bool:
        """Whether a request could be served now."""
        return any(record.state is State.READY for record in self._view.of_role("decode"))
