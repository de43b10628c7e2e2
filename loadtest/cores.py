"""Whether this machine's cores are cores: what all of them get done at once, against one alone, again and again.

    python -m loadtest.cores [--seconds 60] [--threads 2]

2.0 for two threads is two whole cores. Virtual cores may be two threads of one physical core, and others may use it,
too; no counter of the guest says so. Each line is one look: a fixed amount of hashing by one thread, then by all at
once. Measure it beside what you measure, not during it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import threading
from time import perf_counter

from loadtest.stats import Spread, taken

ROUNDS = 150_000  # of PBKDF2: some 50 ms


def hashing() -> None:
    hashlib.pbkdf2_hmac("sha256", b"what", b"is hashed", ROUNDS)  # without Python's lock


def at_once(threads: int) -> float:
    """Seconds until each of so many threads has done it."""
    each = [threading.Thread(target=hashing) for _ in range(threads)]

    def together() -> None:
        for thread in each:
            thread.start()
        for thread in each:
            thread.join()

    return taken(together)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    given = parser.parse_args()
    found: list[float] = []
    until = perf_counter() + given.seconds
    while perf_counter() < until:
        found.append(given.threads * at_once(1) / at_once(given.threads))
        print(f"{found[-1]:.2f} of {given.threads}", flush=True)
    spread = Spread.of(found)
    print(f"median {spread.median:.2f}, middle half {spread.low:.2f} to {spread.high:.2f}, least {min(found):.2f}")


if __name__ == "__main__":
    main()
