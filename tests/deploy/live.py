"""Renders the chart against a cluster that has some objects, by Helm's own dry run: `lookup` finds them. The cluster is
a small server that answers like Kubernetes, as far as the dry run asks."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import helm_python
import yaml

from tests.deploy.chart import CHART, FAST, NAME, NAMESPACE, Document

OURS = {  # of the objects of a release, otherwise Helm refuses to take them over
    "labels": {"app.kubernetes.io/managed-by": "Helm"},
    "annotations": {"meta.helm.sh/release-name": NAME, "meta.helm.sh/release-namespace": NAMESPACE},
}
NOT_FOUND = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


def path_of(document: Document) -> str:
    version = document["apiVersion"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    plural = _plural(document["kind"])
    return f"{root}/namespaces/{NAMESPACE}/{plural}/{document['metadata']['name']}"


def _plural(kind: str) -> str:
    name = kind.lower()
    return name[:-1] + "ies" if name.endswith("y") else name + "s"


def known(documents: list[Document]) -> dict[str, Any]:
    """What the server answers about the kinds of these documents, by path."""
    kinds: dict[str, set[str]] = {"v1": set()}
    for one in documents:
        kinds.setdefault(one["apiVersion"], set()).add(one["kind"])
    groups = [
        {"name": version.partition("/")[0], "versions": [about], "preferredVersion": about}
        for version in kinds
        if "/" in version
        for about in [{"groupVersion": version, "version": version.partition("/")[2]}]
    ]
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        "/openapi/v3": {"paths": {}},
    }
    for version, found in kinds.items():
        about = [
            {"name": _plural(kind), "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get", "list"]}
            for kind in sorted(found)
        ]
        path = f"/apis/{version}" if "/" in version else f"/api/{version}"
        answers[path] = {"kind": "APIResourceList", "groupVersion": version, "resources": about}
    return answers


@contextmanager
def server(answers: dict[str, Any]) -> Iterator[str]:
    """The URL of a server that answers these paths."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            found = path in answers or path == "/openapi/v2"  # without a schema there Helm checks none
            body = b"" if path == "/openapi/v2" else json.dumps(answers.get(path, NOT_FOUND)).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{serving.server_port}"
        finally:
            serving.shutdown()
            thread.join()


def render_over(values: dict[str, Any], documents: list[Document], live: list[Document]) -> list[Document]:
    """The manifests of these values in a cluster that knows the kinds of `documents` and has the objects of `live`."""
    answers = known(documents)
    for one in live:
        answers[path_of(one)] = {**one, "metadata": {**one["metadata"], **OURS, "namespace": NAMESPACE}}
    with server(answers) as url:
        context = {"name": "x", "context": {"cluster": "x", "user": "x", "namespace": NAMESPACE}}
        config = {
            **{"apiVersion": "v1", "kind": "Config", "current-context": "x", "contexts": [context]},
            **{"clusters": [{"name": "x", "cluster": {"server": url}}], "users": [{"name": "x", "user": {}}]},
        }
        cluster = helm_python.Config(
            kubeconfig_content=json.dumps(config), namespace=NAMESPACE, storage_driver="memory"
        )
        with cluster:
            release = cluster.install(str(CHART), NAME, values, namespace=NAMESPACE, dry_run="server")
    return [one for one in yaml.load_all(release["manifest"], FAST) if one]
