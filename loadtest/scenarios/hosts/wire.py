"""A wire between two network namespaces in user space, where the kernel has no netem.

    python wire.py PID_A DEVICE_A PID_B DEVICE_B

makes a TAP device in the network namespace of each process and carries the frames. It reads `delay MS` (each way) and
`loss SHARE` from stdin, and ends with it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
from collections import deque
from time import monotonic

TUNSETIFF, IFF_TAP, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0002, 0x1000, 0x40000000
FRAMES_AT_ONCE = 64
MAX_QUEUE = 4096  # frames under way in one direction; more are lost, as on a router
libc = ctypes.CDLL(None, use_errno=True)


def tap(pid: int, name: str) -> int:
    home, there = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if libc.setns(there, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "txqueuelen", "5000"], check=True)
    if libc.setns(home, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    return device


def main() -> None:
    a, b = tap(int(sys.argv[1]), sys.argv[2]), tap(int(sys.argv[3]), sys.argv[4])
    print("up", flush=True)
    options = {"delay": 0.0, "loss": 0.0}
    under_way: dict[int, deque[tuple[float, bytes]]] = {a: deque(), b: deque()}  # by the end where they came in
    other = {a: b, b: a}
    while True:
        now = monotonic()
        due = min((frames[0][0] for frames in under_way.values() if frames), default=now + 1)
        for end in select.select([a, b, 0], [], [], max(0.0, due - now))[0]:
            if end == 0:
                words = sys.stdin.readline().split()
                if not words:
                    return
                options |= {name: float(value) for name, value in zip(words[::2], words[1::2], strict=True)}
                continue
            for _ in range(FRAMES_AT_ONCE):
                try:
                    frame = os.read(end, 65536)
                except BlockingIOError:
                    break
                lost = options["loss"] and random.random() < options["loss"]
                if not lost and len(under_way[end]) < MAX_QUEUE:
                    under_way[end].append((monotonic() + options["delay"] / 1e3, frame))
        now = monotonic()
        for end, frames in under_way.items():
            while frames and frames[0][0] <= now:
                try:
                    os.write(other[end], frames.popleft()[1])
                except OSError:  # the other end is down: the frame is lost
                    continue


if __name__ == "__main__":
    main()
