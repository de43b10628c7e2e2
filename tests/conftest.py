"""What every test has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

# Tests with processes, clocks and a machine that others use as well.
SECOND_CHANCE = {"cluster", "deploy", "journey", "kvtransfer", "loadtest"}
# What no busy machine can be the reason for: other tokens, or books that do not balance.
NEVER = ["token", r"assert \[", "ledger", "faults"]
# Files that start Ray, which minds a second one that starts at the same moment, or that measure: one after another.
ALONE = {
    "tests/cluster/test_external_ray.py",
    "tests/cluster/test_scaling.py",
    "tests/cluster/test_up.py",
    "tests/deploy/test_ray.py",
    "tests/journey/test_up.py",
    "tests/loadtest/test_bench.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One that fails is tried once more, and counted as "rerun" in the summary; one whose failure names such a thing
    fails at once."""
    for item in items:
        if item.path.parent.name in SECOND_CHANCE:
            item.add_marker(pytest.mark.flaky(reruns=1, rerun_except=NEVER))


class Files(LoadFileScheduling):
    """With `-n`: the tests of a file, which share what they start, on one worker."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "alone" if file in ALONE else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Files:
    return Files(config, log)


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Weights of tiny models do not belong into somebody's cache folder; child processes inherit this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
