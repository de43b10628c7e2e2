"""Every background task is supervised: tandem/tasks.py creates it, or its creator awaits its outcome."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.rules.test_imports import ROOT, sources

# Functions that create tasks themselves, and who awaits the outcome.
AWAITED = {
    ("services/__main__.py", "run"),  # itself
    (
        "services/adapter_slots.py",
        "held",
    ),  # every request that waits for the adapter; a slot that failed is loaded again
    ("services/worker.py", "drain_and_end"),  # its callback: the worker ends, whatever the outcome
    ("services/kv_events.py", "watch"),  # every watcher; one that failed is begun again
    (
        "services/decode/prefill_peers.py",
        "_begin",
    ),  # every request that needs the source; one that failed is connected again
    ("services/router/frontend/http_answers.py", "__call__"),  # itself
    ("services/router/frontend/batches/batch_runner.py", "_run_lines"),  # itself
    ("services/router/execution/request_executor.py", "completing"),  # the request's outbox
    ("cluster/supervision/supervisor.py", "_take"),  # run
    ("cluster/ray_actors.py", "prepare"),  # every call of prepare, and the launch
    ("cluster/ray_actors.py", "start"),  # every call of start, wait and stop
    ("cluster/ray_actors.py", "switch_role"),  # likewise
    ("cluster/ray_actors.py", "run"),  # itself
    ("cluster/ray_actors.py", "_prepare"),  # whoever takes a spare or counts them
    ("cluster/ray_worker.py", "_with_stages"),  # itself
    ("kvtransfer/backends/nixl_transport.py", "connect"),  # every caller
    ("kvtransfer/backends/nccl/transport.py", "_begin"),  # every connect and read, by the end of the link
    ("kvtransfer/backends/nccl/transport.py", "_talk"),  # itself
    ("kvtransfer/backends/nccl/transport.py", "answer"),  # itself: every end is an event that it waits for
    ("kvtransfer/receiver.py", "add"),  # `finish` and `abort`
    ("kvtransfer/receiver.py", "_verified"),  # itself
    ("services/decode/kv_landing.py", "of"),  # itself, or the next caller
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


def test_a_task_is_supervised_or_its_outcome_is_awaited() -> None:
    """A task that dies unseen leaves a process that looks healthy and no longer follows its cluster."""
    assert {found for path in SERVING for found in creators(path)} <= AWAITED
