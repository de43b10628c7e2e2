"""Kubernetes' API server, asked over HTTPS with the account of this pod."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tandem.errors import PreconditionFailed, Unavailable

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ANSWER_S = 10.0
NOT_FOUND, CONFLICT = 404, 409


class KubernetesApi:
    """Objects of this pod's namespace. `kind` is the part of a path that names it, such as `api/v1/pods` or
    `apis/apps/v1/deployments`. Each call raises Unavailable."""

    def __init__(self, url: str = "", account: Path = ACCOUNT) -> None:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        self._url = url or f"https://{f'[{host}]' if ':' in host else host}:{port}"
        self._account = account

    async def read(self, kind: str, name: str) -> Any:
        return await asyncio.to_thread(self._call, "GET", kind, name, None)

    async def find(self, kind: str, selector: str) -> list[Any]:
        """Those with these labels, such as `a=b,c=d`."""
        answer = await asyncio.to_thread(self._call, "GET", kind, f"?labelSelector={selector}", None)
        return list(answer["items"])

    async def merge(self, kind: str, name: str, change: dict[str, Any]) -> None:
        """Raises PreconditionFailed if it has changed since the `resourceVersion` in the change."""
        await asyncio.to_thread(self._call, "PATCH", kind, name, change)

    async def delete(self, kind: str, name: str, uid: str) -> None:
        """Deletes it if it is there. Raises PreconditionFailed if another one has its name."""
        await asyncio.to_thread(self._call, "DELETE", kind, name, {"preconditions": {"uid": uid}})

    def _call(self, method: str, kind: str, name: str, body: dict[str, Any] | None) -> Any:
        what = f"{kind.rpartition('/')[2]} {name}"
        try:
            namespace, token = ((self._account / part).read_text().strip() for part in ("namespace", "token"))
            version, _, plural = kind.rpartition("/")
            content = "application/merge-patch+json" if method == "PATCH" else "application/json"
            request = urllib.request.Request(
                f"{self._url}/{version}/namespaces/{namespace}/{plural}{'' if name.startswith('?') else '/'}{name}",
                data=None if body is None else json.dumps(body).encode(),
                headers={"Authorization": f"Bearer {token}", "Content-Type": content},
                method=method,
            )
            trusted = None
            if self._url.startswith("https:"):
                trusted = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
            with urllib.request.urlopen(request, timeout=ANSWER_S, context=trusted) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == NOT_FOUND and method == "DELETE":
                return None
            if error.code == CONFLICT:
                raise PreconditionFailed(f"{what} has changed", reason="CONFLICT") from error
            raise Unavailable(f"{what}: the API server answered {error.code}") from error
        except (OSError, ValueError) as error:
            raise Unavailable(f"{what}: the API server cannot be asked: {error}") from error
