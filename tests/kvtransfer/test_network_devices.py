"""Whether KV uses a slow network device of a host, from sysfs files as Linux has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtransfer.backends.network_devices import device_of, why_slow


def ethernet(sysfs: Path, name: str, speed: str, *, real: bool = True, state: str = "up") -> None:
    folder = sysfs / "net" / name
    (folder / "device" if real else folder).mkdir(parents=True)
    (folder / "speed").write_text(f"{speed}\n")
    (folder / "operstate").write_text(f"{state}\n")


def rdma(sysfs: Path, name: str, rate: str, state: str = "4: ACTIVE") -> None:
    folder = sysfs / "infiniband" / name / "ports" / "1"
    folder.mkdir(parents=True)
    (folder / "rate").write_text(f"{rate}\n")
    (folder / "state").write_text(f"{state}\n")


def test_a_faster_ethernet_device_is_named(tmp_path: Path) -> None:
    """The sentence has both speeds and the setting that selects the device; devices that are down, virtual or of
    unknown speed do not count."""
    ethernet(tmp_path, "eth0", "1000")
    ethernet(tmp_path, "eth1", "100000")
    ethernet(tmp_path, "eth2", "400000", state="down")
    ethernet(tmp_path, "docker0", "400000", real=False)
    ethernet(tmp_path, "eth3", "-1")
    slow = why_slow("nixl:ucx:tcp", "eth0", tmp_path)
    assert slow == "KV goes over eth0 with 1 Gbit/s, and eth1 of this host has 100: UCX_NET_DEVICES=eth1 chooses it"
    assert "eth1 of this host has 100: its address as advertise_host" in why_slow("gloo:tcp", "eth0", tmp_path)
    assert why_slow("nixl:ucx:tcp", "eth1", tmp_path) == ""
    assert why_slow("nixl:ucx:tcp", "docker0", tmp_path) == ""  # its speed is unknown


def test_tcp_where_there_is_rdma_is_slow(tmp_path: Path) -> None:
    """TCP is slow on a host with an active RDMA port; of several RDMA devices the faster one is named."""
    ethernet(tmp_path, "eth0", "1000")
    rdma(tmp_path, "mlx5_9", "400 Gb/sec (4X NDR)", state="1: DOWN")
    assert why_slow("nixl:ucx:tcp", "eth0", tmp_path) == ""
    rdma(tmp_path, "mlx5_0", "100 Gb/sec (4X EDR)")
    rdma(tmp_path, "mlx5_1", "200 Gb/sec (4X HDR)")
    assert "this host has mlx5_0, mlx5_1" in why_slow("nixl:ucx:tcp", "eth0", tmp_path)
    assert "transport = nixl" in why_slow("gloo:tcp", "eth0", tmp_path)
    assert "UCX_NET_DEVICES=mlx5_1:1" in why_slow("nixl:ucx:rc_mlx5", "mlx5_0:1", tmp_path)
    assert why_slow("nixl:ucx:rc_mlx5", "mlx5_0:1+mlx5_1:1", tmp_path) == ""


def test_an_address_names_its_device() -> None:
    """Loopback's is `lo`; an address that no device has (RFC 5737) names none."""
    assert [device_of(address) for address in ("127.0.0.1", "192.0.2.1")] == ["lo", ""]


@pytest.mark.parametrize(("link", "devices"), [("nixl:ucx:cma", ""), ("nixl:ucx:tcp", "lo"), ("nixl:ucx:unknown", "")])
def test_within_a_host_no_device_is_slow(tmp_path: Path, link: str, devices: str) -> None:
    """A path within one host, or one that was not observed, is never reported as slow."""
    ethernet(tmp_path, "eth1", "100000")
    assert why_slow(link, devices, tmp_path) == ""
