"""Renders the chart for tests, by the real Helm library, offline.

`python -m tests.deploy.chart` updates the settings in values.schema.json after a change of settings.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import helm_python
import yaml

from tandem.model_settings import MODEL_SETTINGS
from tandem.settings import Settings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/tandem"
SCHEMA = CHART / "values.schema.json"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
NAME, NAMESPACE = "demo", "llm"
FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Settings that the chart sets from its own values, or that have no use in a pod.
OWN = {
    *("prefill", "decode", "routers", "host", "advertise_host", "port", "http_port", "worker_port", "api_keys"),
    *("cluster", "metrics_port", "models", "host_workers"),
    *("tls_cert", "tls_key", "tls_client_ca", "cluster_cert", "cluster_key", "cluster_ca", "cluster_token"),
    *("redis", "ray_address", "logs"),
    # The kubelet's startup probe replaces it.
    "start_timeout_s",
    # An HPA or KEDA sizes the pools.
    *("autoscale", "prefill_max", "decode_max", "autoscale_hold_s", "spares"),
}
# Settings for which every role has its own value.
OF_A_ROLE = ("drain_grace_s",)
# Settings that may differ between the workers of the two pools of one request.
OF_A_POOL = (
    *("device", "gpu_share", "threads", "weight_cache", "weight_cache_gib", "max_num_seqs", "max_num_batched_tokens"),
    *("prefill_tp", "decode_tp"),
    *("stream_stretch", "memory_utilization", "kv_blocks", *OF_A_ROLE),
)
OF_THE_ROUTER = (
    *("queue_timeout_s", "stream_interval_s", "max_attempts", "local_prefill", "place_by_prefix"),
    *OF_A_ROLE,
)

Document = dict[str, Any]


def example(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
    return values


def render(values: dict[str, Any], name: str = NAME, install: int = 0) -> list[Document]:
    """The manifests, test hooks included; each install has another Secret. Raises HelmError for values that the schema
    refuses."""
    documents: list[Document] = json.loads(_render(json.dumps(values), name, install))
    return documents


@functools.cache
def _render(values: str, name: str, install: int) -> str:
    documents = (yaml.load_all(text, FAST) for text in texts(json.loads(values), name).values())
    return json.dumps([document for of_a_file in documents for document in of_a_file if document])


def texts(values: dict[str, Any], name: str = NAME, namespace: str = NAMESPACE) -> dict[str, str]:
    """The manifests as text, by template."""
    with helm_python.Chart.load(CHART) as chart:
        found = chart.render(values, name=name, namespace=namespace)
    return {path: text for path, text in found.items() if path.endswith(".yaml")}


def notes(values: dict[str, Any]) -> str:
    """What Helm prints after an install."""
    with helm_python.Chart.load(CHART) as chart:
        return chart.render(values, name=NAME, namespace=NAMESPACE)["tandem/templates/NOTES.txt"]


@functools.cache
def settings_schema() -> dict[str, Any]:
    """The schema of values for each setting, generated from the code."""
    found = Settings.model_json_schema()["properties"]
    return {name: _plain(schema) for name, schema in found.items() if name not in OWN}


def definitions() -> dict[str, dict[str, Any]]:
    """The properties of each place in the values that holds settings."""
    found = settings_schema()
    return {
        "settings": {name: schema for name, schema in found.items() if name not in OF_A_ROLE},
        "model_settings": {name: schema for name, schema in found.items() if name in MODEL_SETTINGS},
        "pool_settings": {name: found[name] for name in OF_A_POOL},
        "router_settings": {name: found[name] for name in OF_THE_ROUTER},
    }


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        schema = next(one for one in schema["anyOf"] if one != {"type": "null"})
    kept = {key: value for key, value in schema.items() if key not in ("title", "default", "format")}
    return {**kept, "additionalProperties": False} if kept["type"] == "object" else kept


def _write() -> None:
    schema = json.loads(SCHEMA.read_text())
    for name, properties in definitions().items():
        schema["$defs"][name]["properties"] = properties
    SCHEMA.write_text(json.dumps(schema, indent=2) + "\n")


if __name__ == "__main__":
    _write()
