"""Access control between the cluster's processes: a token, with which a worker's port serves only its own cluster, and
certificates, which do the same and encrypt the calls."""

from __future__ import annotations

import hmac
from pathlib import Path

import grpc

from tandem.errors import SettingsError, Unauthenticated
from tandem.grpc_errors import Guard, Metadata
from tandem.rpc.addresses import LOOPBACK_HOSTS
from tandem.settings import Settings

TOKEN_METADATA = "tandem-cluster"  # the metadata that holds the token
CLUSTER_NAME = "tandem-cluster"  # the name in the cluster's own certificates, whatever address is called


def front_door(settings: Settings) -> grpc.ServerCredentials | None:
    """The router's credentials for clients; None: nothing is encrypted. Raises SettingsError."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    pair = (_pem(settings.tls_key, "tls_key"), _pem(settings.tls_cert, "tls_cert"))
    ca = _pem(settings.tls_client_ca, "tls_client_ca") if settings.tls_client_ca else None
    return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)


def of_worker(settings: Settings) -> grpc.ServerCredentials | None:
    """A worker's credentials for its own cluster."""
    if (pems := _of_cluster(settings)) is None:
        return None
    ca, key, cert = pems
    return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)


def to_workers(settings: Settings) -> grpc.ChannelCredentials | None:
    """The credentials of the router and decode workers for calls to workers."""
    pems = _of_cluster(settings)
    return grpc.ssl_channel_credentials(*pems) if pems else None


def _of_cluster(settings: Settings) -> tuple[bytes, bytes, bytes] | None:
    """The certificate authority, and the key and certificate of every process of the cluster."""
    if settings.cluster_cert is None or settings.cluster_key is None or settings.cluster_ca is None:
        return None
    return (
        _pem(settings.cluster_ca, "cluster_ca"),
        _pem(settings.cluster_key, "cluster_key"),
        _pem(settings.cluster_cert, "cluster_cert"),
    )


def _pem(path: Path, field: str) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}", field=field, bound="a PEM file") from error


class ClusterGuard:
    """Admits only calls with the cluster's token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def __call__(self, method: str, shown: Metadata) -> None:
        """Raises Unauthenticated."""
        token = shown.get(TOKEN_METADATA, "")
        if not hmac.compare_digest(token.encode() if isinstance(token, str) else token, self._token):
            raise Unauthenticated(
                "a worker's port serves its own cluster only; clients call the router",
                field=TOKEN_METADATA,
                bound="the cluster_token of this cluster",
            )


def guard(settings: Settings) -> Guard | None:
    """The guard of a worker's server. Raises SettingsError if the network could reach it without credentials."""
    if settings.cluster_token is not None:
        return ClusterGuard(settings.cluster_token.get_secret_value())
    if settings.host not in LOOPBACK_HOSTS and settings.cluster_cert is None:
        raise SettingsError(
            f"a worker that listens on {settings.host} needs a cluster_token or a cluster_cert",
            field="cluster_token",
            bound="the same secret for all processes of a cluster, as in TANDEM_CLUSTER_TOKEN=$(openssl rand -hex 16)",
        )
    return None
