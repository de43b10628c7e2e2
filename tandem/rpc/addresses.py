"""Addresses as text: host:port, with an IPv6 address in brackets."""

from __future__ import annotations

WILDCARD_HOSTS = ("0.0.0.0", "::", "[::]")
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


def host_port(host: str, port: int) -> str:
    """`host` is a name or an address; an IPv6 one with or without brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def host_of(address: str) -> str:
    """The host of `host_port`, an IPv6 address without its brackets."""
    return address.rpartition(":")[0].strip("[]")
