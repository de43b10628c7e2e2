"""A launcher for `cluster.local_cluster.LocalCluster` whose workers are slow devices: each step of the engine takes as
long as LOADTEST_DEVICE says, however fast this machine has computed it. All else is real: tokens, KV, transfers,
scheduling.

Only for measurements of several workers on fewer cores: their simultaneous work must fit on the cores, so that each is
as fast as if it had its own. A step for which this machine needs longer takes longer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from engine.core.step_time import StepTime
from services import launch
from services.launch import Service, prepare
from tandem.settings import Settings

if TYPE_CHECKING:  # a router is started by this as well, and loads no torch
    from engine.core.progress import Progress
    from engine.engine import Engine
    from engine.engine_thread import EngineThread

__all__ = ["LAUNCHER", "Device", "prepare", "slow_down", "start"]

LAUNCHER = "loadtest.scenarios.slow_device"
VARIABLE = "LOADTEST_DEVICE"


@dataclass(frozen=True)
class Device:
    """As `engine.core.step_time` describes a worker."""

    step_s: float = 0.02
    stream_s: float = 0.002
    prompt_rate: float = 900.0

    def seconds(self, prompt_tokens: int, streams: int) -> float:
        return self.step_s + self.stream_s * max(0, streams - 1) + prompt_tokens / self.prompt_rate

    def environment(self) -> dict[str, str]:
        """For the processes that are launched."""
        return {VARIABLE: json.dumps(asdict(self))}


def slow_down(engine: Engine, device: Device) -> None:
    compute = engine.step

    def step() -> list[Progress]:
        began = monotonic()
        progress = compute()
        if progress:
            sleep(max(0.0, began + device.seconds(engine.prompt_tokens, engine.streams) - monotonic()))
        return progress

    engine.pace = StepTime(
        device.step_s, device.stream_s, device.prompt_rate
    )  # what it measured of itself before was not this
    vars(engine)["step"] = step


async def start(
    role: str, settings: Settings, worker_id: str, say: Callable[[str], None], engine: EngineThread | None = None
) -> Service:
    """As services.launch.start. An engine that was released is slow already."""
    if role != "router" and engine is None:
        from services.worker import load_engine

        engine = await load_engine(settings, say)
        device = Device(**json.loads(os.environ[VARIABLE]))
        await engine.call(lambda: slow_down(engine.engine, device))
    overrides: dict[str, Any] = {} if engine is None else {"engine": engine}
    return await launch.start(role, settings, worker_id, say, **overrides)
