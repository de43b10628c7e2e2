"""Every background task is supervised: tandem/tasks.py creates it, or its creator awaits its outcome."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.rules.test_imports import ROOT, sources

# Functions that create tasks themselves, and who awaits the outcome.
AWAITED = {
    ("services/__main__.py", "run"),  # itself
    ("services/adapters.py", "held"),  # every request that waits for the adapter; a slot that failed is loaded again
    ("services/cache_news.py", "watch"),  # every watcher; one that failed is begun again
    ("services/decode/sources.py", "_begin"),  # every request that needs the source; one that failed is connected again
    ("services/router/http.py", "__call__"),  # itself
    ("services/router/servicer.py", "_completing"),  # the request's outbox
    ("cluster/reconcile.py", "run"),  # itself
    ("cluster/ray_runtime.py", "prepare"),  # every call of prepare, and the launch
    ("cluster/ray_runtime.py", "start"),  # every call of start, wait and stop
    ("cluster/ray_runtime.py", "turn"),  # likewise
    ("cluster/ray_runtime.py", "run"),  # itself
    ("cluster/ray_runtime.py", "_prepare"),  # whoever takes a spare or counts them
    ("cluster/ray_runtime.py", "_told"),  # itself
    ("kvtransfer/nixl_transport.py", "connect"),  # every caller
    ("kvtransfer/inprocess.py", "read"),  # itself
    ("kvtransfer/pull.py", "add"),  # `finish` and `abort`
}
CREATE = {"create_task", "ensure_future"}


def creators(path: Path) -> set[tuple[str, str]]:
    """(file, function) for each function that creates a task itself."""
    name = str(path.relative_to(ROOT))
    return {
        (name, function.name)
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CREATE
    }


SERVING = [path for path in sources() if path.relative_to(ROOT).parts[0] in ("services", "cluster", "kvtransfer")]


@pytest.mark.parametrize("path", SERVING, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_task_is_supervised_or_its_outcome_is_awaited(path: Path) -> None:
    """A task that dies unseen leaves a process that looks healthy and no longer follows its cluster."""
    assert creators(path) <= AWAITED
