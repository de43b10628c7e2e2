"""`python -m services` whose workers write a log line when they begin to work on a request: a request that goes well
has none of a worker."""

from __future__ import annotations

import sys
from contextlib import AbstractAsyncContextManager

import structlog

from services import __main__
from services.worker import Worker

LINE = "test.begins"
log = structlog.get_logger(__name__)
begins = Worker.in_progress


def says(worker: Worker, name: str) -> AbstractAsyncContextManager[None]:
    log.info(LINE)
    return begins(worker, name)


if __name__ == "__main__":
    Worker.in_progress = says  # type: ignore[assignment]
    sys.exit(__main__.main())
