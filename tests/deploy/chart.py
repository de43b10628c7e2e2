"""The chart as tests see it, rendered by the real Helm library, offline.

`python -m tests.deploy.chart` writes what values.schema.json says of settings again, after a change of them.
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
# What the chart itself sets, by values of its own, or what has no use in a pod.
OWN = {
    *("prefill", "decode", "routers", "host", "advertise_host", "port", "http_port", "worker_port", "api_keys"),
    *("cluster", "metrics_port", "models", "host_workers"),
    *("tls_cert", "tls_key", "tls_client_ca", "cluster_cert", "cluster_key", "cluster_ca", "cluster_token"),
    *("redis", "ray_address", "logs", "transport"),
    # The kubelet's startup probe is in its place.
    "start_timeout_s",
    # Here an HPA or KEDA sizes the pools.
    *("autoscale", "prefill_max", "decode_max", "autoscale_hold_s", "spares"),
}
# Which every role has a value of its own for.
OF_A_ROLE = ("drain_grace_s",)
# In which the workers of two pools may differ and still serve one request together.
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
    """The manifests, test hooks included; of another install the Secret is another one. Raises HelmError for values
    that the schema refuses."""
    documents: list[Document] = json.loads(_render(json.dumps(values), name, install))
    return documents


@functools.cache
def _render(values: str, name: str, install: int) -> str:
    documents = (yaml.load_all(text, FAST) for text in texts(json.loads(values), name).values())
    return json.dumps([document for of_a_file in documents for document in of_a_file if document])


def texts(values: dict[str, Any], name: str = NAME, namespace: str = NAMESPACE) -> dict[str, str]:
    """The manifests as text, by their templates."""
    with helm_python.Chart.load(CHART) as chart:
        found = chart.render(values, name=name, namespace=namespace)
    return {path: text for path, text in found.items() if path.endswith(".yaml")}


@functools.cache
def settings_schema() -> dict[str, Any]:
    """What the code says of each setting, as a schema of values."""
    found = Settings.model_json_schema()["properties"]
    return {name: _plain(schema) for name, schema in found.items() if name not in OWN}


def definitions() -> dict[str, dict[str, Any]]:
    """The properties of each place in the values where settings stand."""
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
