"""What every test has."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.support.triton_interpreter import (
    check_no_overflow,
    describe_shapes_once,
    read_signatures_once,
    replace_the_language_once,
    sum_each_row_alone,
)

# Before any library imports Triton, as xgrammar does: tests/engine/test_gpu_attention.py interprets the GPU kernels.
os.environ["TRITON_INTERPRET"] = "1"

# Until all tests are imported: with it, that takes each process a third longer.
gc.disable()

# How long an example takes says more of what else the machine does than of the code.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", settings.get_profile("suite"), max_examples=20)  # make fast
settings.load_profile("suite")

# Files that start Ray, which minds a second one that starts at the same moment, or that measure: one after another.
ALONE = {
    "tests/cluster/test_external_ray.py",
    "tests/cluster/test_autoscaler.py",
    "tests/cluster/test_local_cluster.py",
    "tests/deploy/test_ray.py",
    "tests/deploy/test_wheel.py",
    "tests/journey/test_hosts.py",
    "tests/journey/test_up.py",
    "tests/loadtest/test_bench.py",
    "tests/loadtest/test_chaos.py",
    "tests/loadtest/test_other_servers.py",  # raises the priority of the whole session, which
    "tests/loadtest/test_processes.py",  # looks at
}
# Files whose processes are copies of one that has imported the libraries (tests/support/copies.py): it starts once.
COPIED = {
    "tests/deploy/test_commands.py",
    "tests/engine/test_ranks.py",
    "tests/journey/test_adapters.py",
    "tests/journey/test_families.py",
    "tests/journey/test_kill.py",
    "tests/journey/test_kv_dtype.py",
    "tests/journey/test_ranks.py",
    "tests/kvtransfer/test_nixl.py",
}


# Files that compute in their own process, and wait for no other. With more than two of pytest's workers, the last one
# has these only, at a lower priority: it computes while the tests of the others wait.
COMPUTE = ("tests/engine/", "tests/planner/", "tests/rules/")
COMPUTE_NOT = ("ranks.py", "test_engine_thread.py")
# Those of 8 to 40 s of a core begin first, so that all workers end together.
LONGEST = {
    "tests/engine/test_exactness.py",
    "tests/engine/test_gptq_awq_fp8.py",
    "tests/engine/test_gpu_captured_recurrences.py",
    "tests/engine/test_gpu_codes.py",
    "tests/engine/test_gpu_experts.py",
    "tests/engine/test_gpu_latent.py",
    "tests/engine/test_gpu_recording.py",
    "tests/engine/test_kv_quantization.py",
    "tests/engine/test_models.py",
    "tests/engine/test_recurrent_layers.py",
    "tests/engine/test_tile_attention.py",
}
BACKGROUND_TIMEOUT_S = 1500.0  # instead of pyproject.toml's; a mark would still win, and none of these files has one


class Files(LoadFileScheduling):
    """With `-n`: the tests of a file, which share what they start, on one worker."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        computes = [name for name in self.workqueue if name.startswith(COMPUTE) and not name.endswith(COMPUTE_NOT)]
        computes.sort(key=lambda name: name not in LONGEST)
        if is_background(node.workerinput):
            if not computes:
                node.shutdown()
                return
            self.workqueue.move_to_end(computes[0], last=False)
        else:
            for name in computes:
                self.workqueue.move_to_end(name)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "alone" if file in ALONE else "copied" if file in COPIED else file

    def remove_node(self, node: WorkerController) -> str | None:
        """A test whose process died has failed. xdist would begin with it again in the next process."""
        unfinished = ((unit, test) for unit in self.assigned_work[node].values() for test in unit if not unit[test])
        unit, died = next(unfinished, ({}, None))
        if died:
            unit[died] = True
        super().remove_node(node)
        return died


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Files:
    return Files(config, log)


class ToldAtOnce:
    """A failure is printed when it happens, for a run that is cut off prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            assert terminal is not None
            terminal.write_line(f"\n{report.nodeid} failed ({report.when}):\n{report.longreprtext}")


def is_background(workerinput: dict[str, Any]) -> bool:
    """Of one of pytest's workers, whether it takes what the others leave of the processor."""
    return bool(workerinput["workercount"] > 2 and workerinput["workerid"] == f"gw{workerinput['workercount'] - 1}")


def stand_back() -> None:
    """Gives way to the other workers. Linux may share the processor out between sessions first, each with a priority of
    its own. At priority 19, one process that only computes left 7 % of a core."""
    os.setsid()
    os.nice(10)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("10")


@pytest.hookimpl(tryfirst=True)  # pytest-timeout reads its option in this hook
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # in the process that prints
        config.pluginmanager.register(ToldAtOnce(config))
    elif is_background(config.workerinput):
        stand_back()
        config.option.timeout = config.option.timeout or BACKGROUND_TIMEOUT_S


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Triton, if a test imports it, is as a GPU; and what the tests import stays: no collection looks at it again."""
    if "triton" in sys.modules:
        sum_each_row_alone()
        replace_the_language_once()
        check_no_overflow()
        read_signatures_once()
        describe_shapes_once()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """One thread for torch. Two, beside other tests, cost a tiny model up to seven times the processor time, and a test
    that builds an engine leaves that engine's number to the tests after it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure that cannot be repeated is explained by what the test's processes wrote."""
    report = yield
    if report.failed and "tests.support.harness" in sys.modules:
        report.sections += sys.modules["tests.support.harness"].outputs()
    return report


@pytest.fixture(scope="session", autouse=True)
def environment_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Weights of tiny models do not belong into somebody's cache folder; child processes inherit this. And a client of
    HTTP that verifies servers reads the authorities it knows, 50 ms of a core each time: here it knows none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("authorities")))
        yield
