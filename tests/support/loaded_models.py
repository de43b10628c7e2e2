"""Models that earlier tests have loaded and nobody uses now, for clusters inside the test's process.

Loading and checking a tiny model is most of what starting such a cluster costs, and the suite starts hundreds. Loading
has its own tests, and clusters of processes always load.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path
from threading import Lock
from typing import Any

from engine import kernels
from engine.loading.model_loader import load_model
from engine.runner.model_runner import ModelRunner


class LoadedModels:
    def __init__(self) -> None:
        self._free: dict[Hashable, list[ModelRunner]] = defaultdict(list)
        self._lent: list[tuple[Hashable, ModelRunner, dict[str, Any]]] = []
        self._lock = Lock()  # workers load on threads of their own

    def load(self, path: str, **options: Any) -> ModelRunner:
        """In the place of load_model. Adapters change a model while it serves, so one with them is always loaded; and
        one of several ranks is there as long as they are."""
        if options.get("adapters") or options.get("later_rank") or options.get("group") or not Path(path).is_dir():
            return load_model(path, **options)
        key = _key(path, options)
        with self._lock:
            free = self._free[key]
            model = free.pop() if free else None
        if model is None:
            model = load_model(path, **options)
        with self._lock:
            self._lent.append((key, model, dict(vars(model))))
        return model

    def give_back(self) -> None:
        """All of them, as they were loaded. The engines that had them have ended."""
        for key, model, loaded in self._lent:
            vars(model).clear()
            vars(model).update(loaded)
            self._free[key].append(model)
        self._lent.clear()


def _key(path: str, options: dict[str, Any]) -> Hashable:
    """Equal where the same would be loaded: the same files and options, by the same operators. A copy of a folder, as
    shutil.copytree makes it, with another tokenizer or chat template is the same model."""
    files = [
        (file.name, file.stat().st_mtime_ns, file.stat().st_size)
        for file in sorted(Path(path).iterdir())
        if not file.name.startswith("tokenizer") and file.suffix != ".jinja"
    ]
    given = {name: str(value) for name, value in options.items() if name not in ("progress", "cache")}
    order = kernels.sum_order(options["device"], options["dtype"])
    return tuple(files), tuple(sorted(given.items())), kernels.serving(options["device"]), order
