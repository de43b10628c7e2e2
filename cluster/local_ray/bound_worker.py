"""Becomes a Ray worker that ends with its raylet, from its first moment on. The raylet starts each worker with
`bound_worker.py default_worker.py …`.

A worker of Ray 2.60 notices the death of its raylet only once it has started: after 25 s if the raylet was killed
meanwhile.
Ray has its own script in this place, which prepares a runtime environment; without one, the raylet leaves out whatever
is called setup_worker.py. This one prepares nothing and does not import Ray.
"""

from __future__ import annotations

import os
import sys

from cluster.exit_with_parent import exit_with_parent

LANGUAGE, CONTEXT = "--language=", "--serialized-runtime-env-context="

if __name__ == "__main__":
    exit_with_parent()
    if prepared := [one for one in sys.argv if one.startswith(CONTEXT) and one != f"{CONTEXT}{{}}"]:
        sys.exit(f"a Ray that `tandem up` starts prepares no runtime environment: {prepared[0]}")
    worker = [one for one in sys.argv[1:] if not one.startswith((LANGUAGE, CONTEXT))]
    os.execv(sys.executable, [sys.executable, *worker])
