"""Authorities and certificates for tests and load tests, made by openssl."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
# Certificates for this machine, the cluster and a client: their names, and what they are valid for.
NAMES = (("router", "IP:127.0.0.1"), ("cluster", "DNS:tandem-cluster"), ("client", "DNS:client"))


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)


def make(folder: Path, *authorities: str, names: Iterable[tuple[str, str]] = NAMES) -> Path:
    """AUTHORITY.pem, and by each a certificate for each of `names`: AUTHORITY-NAME.pem and .key. Returns the folder."""
    for authority in authorities:
        ca, key = folder / f"{authority}.pem", folder / f"{authority}.key"
        openssl("req", "-x509", *KEY, "-keyout", key, "-out", ca, "-subj", f"/CN={authority}")
        for name, known_as in names:
            at = folder / f"{authority}-{name}"
            by = ("-CA", ca, "-CAkey", key, "-addext", f"subjectAltName={known_as}")
            openssl("req", "-x509", *KEY, *by, "-keyout", f"{at}.key", "-out", f"{at}.pem", "-subj", f"/CN={name}")
    return folder
