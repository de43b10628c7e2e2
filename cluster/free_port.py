"""A port for a router, chosen before anything starts."""

from __future__ import annotations

import secrets
import socket

from tandem.errors import SettingsError

# Range from which port 0 is chosen: below the ephemeral ports, so that no outgoing connection takes the port before it
# is bound.
FIRST_PORT, PORT_COUNT, MAX_PORT_TRIES = 20_000, 12_000, 50


def free_port(host: str, port: int, field: str) -> int:
    """`port`, or a free one for 0, chosen once: a restarted router must reappear at the same port."""
    candidates = [port] if port else [FIRST_PORT + secrets.randbelow(PORT_COUNT) for _ in range(MAX_PORT_TRIES)]
    for candidate in candidates:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, candidate, type=socket.SOCK_STREAM)[0]
        except (OSError, UnicodeError) as error:
            raise SettingsError(
                f"host {host!r:.100} is unknown: {error}", field="host", bound="a name or an address, without a port"
            ) from error
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                return candidate
            except OSError as error:
                refused = error
    raise SettingsError(
        f"port {candidate} on {host} cannot be used: {refused.strerror}", field=field, bound="a free port, or 0"
    ) from refused
