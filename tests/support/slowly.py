"""`python -m services` whose engine takes at least TESTS_STEP_S for each step until the file TESTS_QUICK is there: a
stream is not over before what is to happen in it, however long the machine takes to let it happen."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from services import __main__, launch
from tests.support.faults import slow_down

start = launch.start


async def slowly(role: str, *given: Any) -> Any:
    service = await start(role, *given)
    if role != "router":
        slow_down(service, float(os.environ["TESTS_STEP_S"]), until=Path(os.environ["TESTS_QUICK"]).exists)
    return service


if __name__ == "__main__":
    launch.start = slowly
    sys.exit(__main__.main())
