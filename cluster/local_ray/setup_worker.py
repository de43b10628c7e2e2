"""Becomes a worker of Ray. Its raylet starts each one with `setup_worker.py default_worker.py …`.

Ray's script of this name imports Ray to prepare a runtime environment. Nothing is prepared here, so this one imports
nothing: a worker starts a second earlier.
"""

from __future__ import annotations

import os
import sys

NOT_OF_THE_WORKER = ("--language=", "--serialized-runtime-env-context=")

if __name__ == "__main__":
    worker = [one for one in sys.argv[1:] if not one.startswith(NOT_OF_THE_WORKER)]
    os.execv(sys.executable, [sys.executable, *worker])
