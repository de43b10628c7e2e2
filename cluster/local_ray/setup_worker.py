"""Becomes a Ray worker. The raylet starts each worker with `setup_worker.py default_worker.py …`.

Ray's script of this name imports Ray to prepare a runtime environment. This one prepares nothing and imports nothing,
so a worker starts a second earlier.
"""

from __future__ import annotations

import os
import sys

LANGUAGE, CONTEXT = "--language=", "--serialized-runtime-env-context="

if __name__ == "__main__":
    if prepared := [one for one in sys.argv if one.startswith(CONTEXT) and one != f"{CONTEXT}{{}}"]:
        sys.exit(f"a Ray that `tandem up` starts prepares no runtime environment: {prepared[0]}")
    worker = [one for one in sys.argv[1:] if not one.startswith((LANGUAGE, CONTEXT))]
    os.execv(sys.executable, [sys.executable, *worker])
