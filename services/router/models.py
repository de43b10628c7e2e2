"""The models that this router serves, by the names that requests use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from cluster.state.registry import State
from services.router.generation import Generation
from services.router.model_pools import ModelPools
from services.router.preprocess.sampling_defaults import Defaults
from services.router.preprocess.served_model import ServedModel
from services.router.preprocess.tokenizer import Tokenizer
from tandem.errors import InvalidRequest, NotFound, NoWorker, TandemError


@dataclass(frozen=True, slots=True)
class Model:
    """One model: the parser and the path of its requests."""

    key: str  # its name in the setting `models`; empty for the only one
    tokenizer: Tokenizer
    defaults: Defaults
    pools: ModelPools
    generation: Generation

    @property
    def names(self) -> tuple[str, ...]:
        """For clients; answers have the first."""
        return self.pools.settings.model_names

    @property
    def served(self) -> ServedModel:
        return self.pools.served

    @property
    def context(self) -> int:
        """The context's length in tokens. Raises NoWorker before the first decode worker is ready."""
        return self.served.facts().context

    def pool(self, role: str) -> str:
        """The name of a pool, as operators see it."""
        return f"{self.key}/{role}" if self.key else role


class Models:
    """All models, in the order of the settings."""

    def __init__(self, models: Sequence[Model]) -> None:
        self._models = models
        self._by_name: dict[str, Model] = {}
        for model in models:
            path = model.pools.settings.model
            for name in (*model.names, *((path,) if path not in self._by_name else ()), *filter(None, (model.key,))):
                self._by_name[name] = model

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models)

    @property
    def first(self) -> Model:
        return self._models[0]

    @property
    def context(self) -> int:
        """The longest context of all models. Raises NoWorker before the first decode worker is ready."""
        found: list[int] = []
        for model in self._models:
            with suppress(NoWorker):
                found.append(model.context)
        return max(found) if found else self.first.context

    def named(self, name: str) -> Model:
        """The model with this name; with an empty name the only one. Raises NotFound for an unknown name,
        InvalidRequest for an empty name if there are several."""
        if model := self._by_name.get(name):
            return model
        if not name and len(self._models) == 1:
            return self._models[0]
        raise _unknown(name, [model.names[0] for model in self._models])

    def resolve(self, name: str | None) -> tuple[Model, str, str]:
        """Resolves the model or adapter that an HTTP request names: the model, its name in the answer, and the adapter,
        empty for the base model. Raises as `named`."""
        for model in self._models if name else ():
            if name in model.served.adapters:
                assert name
                return model, name, name
        try:
            model = self.named(name or "")
        except (NotFound, InvalidRequest) as error:
            names = [known for model in self._models for known in (*model.names, *model.served.adapters)]
            raise _unknown(name or "", names) from error
        return model, model.names[0], ""

    def key_of(self, name: str) -> str:
        """The key of the model whose workers a request with this name needs; empty where it will be refused."""
        for model in self._models if name else ():
            if name in model.served.adapters:
                return model.key
        found = self._by_name.get(name)
        return found.key if found else ""

    def is_taken(self, name: str) -> bool:
        """Whether a model or an adapter has this name."""
        return name in self._by_name or any(name in model.served.adapters for model in self._models)

    def running(self) -> int:
        """Requests in progress."""
        return sum(model.generation.running for model in self._models)

    def waiting(self, key: str | None = None) -> int:
        """Requests that wait for a placement: all of them, or those to the model of this key."""
        chosen = [model for model in self._models if key is None or model.key == key]
        return sum(model.pools.scheduler.waiting() for model in chosen)

    def ready(self) -> bool:
        """Whether a request could be served now."""
        return any(model.served.ready() for model in self._models)

    def reached(self) -> bool:
        """Whether a decode worker of any model has answered this router."""
        return any(model.pools.reached for model in self._models)

    def lacks_new_pools(self) -> bool:
        """Whether a model has no decode worker here, but may have some at another router: a ready one that serves other
        models with this one has no record in this model's pools, as in an upgrade that gives it other pools."""
        of_each = [
            {one.worker_id for one in model.pools.view.of_role("router") if one.state is State.READY}
            for model in self._models
        ]
        known = set[str]().union(*of_each)
        there = zip(self._models, of_each, strict=True)
        return any(routers != known and not model.served.ready() for model, routers in there)


def _unknown(name: str, names: Sequence[str]) -> TandemError:
    bound = ", ".join(names)
    if not name:
        return InvalidRequest(f"the request names no model; there are: {bound}", field="model", bound=bound)
    return NotFound(f"there is no model {name!r:.140}; there are: {bound}", field="model", bound=bound)
