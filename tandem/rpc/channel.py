"""A client's connection to a router: channel options, TLS, credentials of a call."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import grpc
import grpc.aio

from tandem.errors import InvalidRequest
from tandem.rpc.addresses import host_of
from tandem.telemetry.tracing import Span
from tandem.v1 import generation_pb2, jobs_pb2

DEFAULT_TARGET = "localhost:50051"
GENERATION = "tandem.v1.GenerationService"
ADMIN = "tandem.v1.AdminService"
JOBS = "tandem.v1.JobService"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message sent or read. Well above what a router accepts, so that its own answer is what the caller sees."""


# A call is retried only while the server has sent nothing: gRPC commits a call at its first response.
# Scaling and draining change the cluster, so they are tried once.
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [
                {"service": GENERATION},
                {"service": JOBS},
                {"service": ADMIN, "method": "ListWorkers"},
                {"service": ADMIN, "method": "GetScaling"},
                {"service": ADMIN, "method": "Audit"},
                {"service": ADMIN, "method": "Diagnose"},
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
}


def _channel_options(target: str) -> list[tuple[str, Any]]:
    host = host_of(target)
    return [
        ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.use_local_subchannel_pool", 1),  # a separate connection, which may reach another router
        ("grpc.http2.max_pings_without_data", 0),  # during a long prefill nothing is sent except pings
        # Ignores a proxy in the environment.
        ("grpc.enable_http_proxy", 0 if host in ("localhost", "127.0.0.1", "::1") else 1),
    ]


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    key = os.environ.get("TANDEM_API_KEY", "") if api_key is None else api_key
    if not (key.isascii() and key.isprintable()):
        raise InvalidRequest("the API key is not printable ASCII", field="api_key", bound="printable ASCII")
    return (("authorization", f"Bearer {key}"),) if key else ()


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: the router's authority and the client's own certificate. Without `ca` nothing is encrypted."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @classmethod
    def of_environment(cls) -> Tls:
        """TANDEM_TLS_CA, and if the router requires a certificate TANDEM_TLS_CLIENT_CERT and ..._KEY."""
        names = ("TANDEM_TLS_CA", "TANDEM_TLS_CLIENT_CERT", "TANDEM_TLS_CLIENT_KEY")
        return cls(*(Path(os.environ[name]) if os.environ.get(name) else None for name in names))

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Raises InvalidRequest for files that cannot be read, or half of a pair."""
        if (self.cert is None) != (self.key is None) or (self.cert is not None and self.ca is None):
            raise InvalidRequest("a client certificate needs its key and the router's authority", field="tls")
        if self.ca is None:
            return None
        try:
            pems = [path.expanduser().read_bytes() if path else None for path in (self.ca, self.key, self.cert)]
        except OSError as error:
            raise InvalidRequest(f"{error.filename} cannot be read: {error.strerror}", field="tls") from error
        return grpc.ssl_channel_credentials(*pems)


class _Connection:
    """A channel to one cluster, and its two streams."""

    _grpc: ClassVar[Any]  # grpc, or grpc.aio with the same names

    def __init__(self, target: str = DEFAULT_TARGET, *, api_key: str | None = None, tls: Tls | None = None) -> None:
        """`target` is the router's HOST:PORT; `api_key` defaults to TANDEM_API_KEY of the environment, `tls` to the
        files in TANDEM_TLS_CA and others. Connects on first use."""
        self.target = target
        self._metadata = _metadata(api_key)
        credentials, options = (tls or Tls.of_environment()).credentials(), _channel_options(target)
        self._channel = (
            self._grpc.secure_channel(target, credentials, options=options)
            if credentials
            else self._grpc.insecure_channel(target, options=options)
        )
        self._generate = self._channel.unary_stream(
            f"/{GENERATION}/Generate",
            request_serializer=generation_pb2.GenerateRequest.SerializeToString,
            response_deserializer=generation_pb2.GenerateResponse.FromString,
        )
        self._watch = self._channel.unary_stream(
            f"/{JOBS}/WatchJob",
            request_serializer=jobs_pb2.WatchJobRequest.SerializeToString,
            response_deserializer=jobs_pb2.WatchJobResponse.FromString,
        )

    def _call(self, question: Any, span: Span) -> Any:
        """The answer to a `unary_calls.Question`; of an AsyncClient to be awaited."""
        call = self._channel.unary_unary(
            question.path,
            request_serializer=type(question.request).SerializeToString,
            response_deserializer=question.answer.FromString,
        )
        return call(question.request, timeout=question.timeout, metadata=(*self._metadata, *span.headers))
