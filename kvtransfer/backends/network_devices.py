"""The network devices of this host, from Linux's sysfs, and whether KV uses a slow one."""

from __future__ import annotations

from pathlib import Path

import psutil

SYSFS = Path("/sys/class")
RDMA_BY_UCX = (
    "see that UCX_TLS and UCX_NET_DEVICES admit it, that /dev/infiniband is there, and that memory may be locked"
    " (ulimit -l)"
)
ACTIVE = "ACTIVE"  # of an RDMA port's state, as in "4: ACTIVE"


def why_slow(link: str, devices: str, sysfs: Path = SYSFS) -> str:
    """A sentence if this host has a faster device than the one that reads use; otherwise empty.

    `link` is as in Transport.link, `devices` as in Transport.device. The host of the other worker is not examined. RDMA
    devices have not been tried.
    """
    used = {name.partition(":")[0] for name in devices.split("+") if name}
    if not used or used == {"lo"}:
        return ""
    rdma, ethernet = _rdma(sysfs / "infiniband"), _ethernet(sysfs / "net")
    by_tcp = link.endswith("tcp")
    if by_tcp and rdma:
        return f"KV goes by TCP over {devices}, and this host has {', '.join(sorted(rdma))}: " + (
            "transport = nixl can use it" if link.startswith("gloo") else RDMA_BY_UCX
        )
    speeds = ethernet if by_tcp else rdma
    known = [speeds[name] for name in used if name in speeds]
    faster = {name: speed for name, speed in speeds.items() if name not in used and known and speed > max(known)}
    if not faster:
        return ""
    best = max(faster, key=lambda name: faster[name])
    by_ucx = f"UCX_NET_DEVICES={best}{'' if by_tcp else ':1'} chooses it"
    return (
        f"KV goes over {devices} with {max(known) / 1e3:g} Gbit/s, and {best} of this host has {faster[best] / 1e3:g}:"
        f" {'its address as advertise_host chooses it' if link.startswith('gloo') else by_ucx}"
    )


def device_of(address: str) -> str:
    """The device of this host with that IP address; empty if none has it."""
    known = psutil.net_if_addrs().items()
    return next((name for name, given in known if any(one.address.partition("%")[0] == address for one in given)), "")


def _ethernet(folder: Path) -> dict[str, float]:
    """Mbit/s of each device that is up; virtual devices have no speed, or a meaningless one."""
    speeds: dict[str, float] = {}
    for device in folder.glob("*"):
        speed = _text(device / "speed")
        if (device / "device").exists() and _text(device / "operstate") == "up" and speed.isdigit():
            speeds[device.name] = float(speed)
    return speeds


def _rdma(folder: Path) -> dict[str, float]:
    """Mbit/s of the fastest active port of each device."""
    speeds: dict[str, float] = {}
    for port in folder.glob("*/ports/*"):
        rate = _text(port / "rate").partition(" ")[0]  # "200 Gb/sec (4X HDR)"
        if _text(port / "state").endswith(ACTIVE) and rate.replace(".", "", 1).isdigit():
            name = port.parents[1].name
            speeds[name] = max(speeds.get(name, 0.0), float(rate) * 1e3)
    return speeds


def _text(path: Path) -> str:
    """The file's text; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
