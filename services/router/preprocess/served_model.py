"""Facts about the served model, from the records of the decode workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from cluster.state.adapter_list import AdapterList
from cluster.state.registry import State, WorkerRecord
from services.adapter_follower import AdapterFollower
from services.worker_liveness import WorkerLiveness
from tandem.errors import NoWorker


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts against which a request is validated."""

    context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    adapters: Mapping[str, bytes] = field(default_factory=dict)  # as ServedModel.adapters


class ServedModel:
    def __init__(self, view: WorkerLiveness, adapters: Iterable[str], loaded: AdapterFollower) -> None:
        """`adapters` are those of the settings, `loaded` those that were loaded while the cluster runs."""
        self._view = view
        self._of_settings = dict.fromkeys(adapters, b"")
        self._loaded = loaded
        self._listed: AdapterList | None = None  # the list that `_adapters` are from
        self._adapters: Mapping[str, bytes] = self._of_settings
        self._facts: ModelFacts | None = None
        self._read_from: object = None  # the view's workers that the facts were read from

    @property
    def adapters(self) -> Mapping[str, bytes]:
        """The adapters that a request may name, with their fingerprints; the router does not know those of adapters
        from the settings."""
        if self._loaded.list is not self._listed:
            self._listed = self._loaded.list
            loaded = {name: adapter.digest for name, adapter in self._listed.adapters.items()}
            self._adapters = {**loaded, **self._of_settings}
        return self._adapters

    def facts(self) -> ModelFacts:
        """The last known facts while no decode worker is present. Raises NoWorker before the first one is."""
        adapters = self.adapters
        if self._facts and self._facts.adapters is not adapters:
            self._facts = replace(self._facts, adapters=adapters)
        if self._read_from is self._view.workers and self._facts:
            return self._facts
        self._read_from = self._view.workers
        records = self._view.of_role("decode")
        if records:
            longest = max(records, key=lambda record: record.max_model_len)
            self._facts = ModelFacts(
                context=longest.max_model_len,
                vocab_size=longest.vocab_size,
                eos_token_ids=tuple(longest.eos_token_ids),
                adapters=adapters,
            )
        if self._facts is None:
            what = f"no decode worker{self._view.needed} has started yet"
            raise NoWorker(f"{what}; `tandem workers` shows the pools", retry_after=2.0)
        return self._facts

    async def refresh(self) -> None:
        """Reads the registry now."""
        await self._view.refresh()

    def decode_workers(self) -> list[WorkerRecord]:
        """The present decode workers."""
        return self._view.of_role("decode")

    def ready(self) -> bool:
        """Whether a request could be served now."""
        return any(record.state is State.READY for record in self._view.of_role("decode"))
