"""The metrics in alerts, dashboards and scalers exist in the code, and every alert has a page that says what to do."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator

import promql_parser
import pytest
import yaml
from prometheus_client.core import Metric

from tandem.settings import Settings
from tandem.telemetry.cluster_metrics import PoolSize, Reach, Supervision
from tandem.telemetry.metrics import Load, Metrics, RouterMetrics, WorkerMetrics
from tests.deploy.chart import CHART, ROOT, Document, example, render, texts

RUNBOOKS = ROOT / "docs/runbooks"
ADDED = {"namespace", "tandem", "pool", "worker", "model"}  # by Prometheus, by the PodMonitor, and on every sample
ENDS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}
SECTIONS = ("## What it means", "## Look", "## Do")


@functools.cache
def counted() -> dict[str, set[str]]:
    """The names of samples and their labels, as the processes export them."""
    settings = Settings(model="m")
    load = Load("ready", 0, 0, 1, 0, 0, 0, 1.0, 0)
    reach = Reach(True, 0.001, (1, 2))
    supervision = Supervision(True, (PoolSize("decode", 2, 1),))
    found: dict[str, set[str]] = {}
    for one in (
        RouterMetrics(settings, "r", lambda: 0, lambda: reach, lambda: supervision),
        WorkerMetrics(settings, "decode", "d", lambda: load),
    ):
        labels = {collector: set(getattr(collector, "_labelnames", ())) for collector in made(one)}
        for collector, names in labels.items():
            for family in collector.collect():  # type: ignore[attr-defined]
                for name in samples(family):
                    of_samples = {label for sample in family.samples for label in sample.labels}
                    found[name] = found.get(name, set()) | names | of_samples | ADDED
                    if name.endswith("_bucket"):
                        found[name].add("le")
    return found


def made(metrics: Metrics) -> list[object]:
    return list(metrics._registry._collector_to_names)


def samples(family: Metric) -> list[str]:
    return [family.name + end for end in ENDS[family.type]]


def asked(query: str) -> Iterator[tuple[str, set[str]]]:
    """The metrics of a query with the labels that it uses; labels in `by` count if the query has a single metric.
    Raises for queries that Prometheus would not parse."""
    tree = promql_parser.parse(query.replace("$__rate_interval", "5m"))
    found: list[tuple[str, set[str]]] = []
    grouped: set[str] = set()

    def visit(node: object) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node.name, {matcher.name for matcher in node.matchers.matchers}))
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier:
            grouped.update(node.modifier.labels)

    promql_parser.walk(tree, visit)
    assert found, query
    return ((name, labels | (grouped if len(found) == 1 else set())) for name, labels in found)


def everything() -> list[Document]:
    return render(example("ray")) + render(example("rdma")) + render(example("tenants"))


def rules() -> list[Document]:
    documents = [one for one in everything() if one["kind"] == "PrometheusRule"]
    return [rule for one in documents for group in one["spec"]["groups"] for rule in group["rules"]]


def boards() -> list[Document]:
    return [json.loads(text) for one in everything() if one["kind"] == "ConfigMap" for text in one["data"].values()]


def queries() -> list[str]:
    found = [rule["expr"] for rule in rules()]
    found += [target["expr"] for board in boards() for panel in board["panels"] for target in panel["targets"]]
    for one in everything():
        if one["kind"] == "ScaledObject":
            found += [trigger["metadata"]["query"] for trigger in one["spec"]["triggers"]]
    return found


def test_every_query_is_about_something_that_is_counted() -> None:
    """Every metric and label of a query exists, and every query selects this release only."""
    for query in queries():
        for name, labels in asked(query):
            assert name in counted(), query
            assert labels <= counted()[name], query
            assert {"namespace", "tandem"} <= labels, query
    for one in everything():
        if one["kind"] == "HorizontalPodAutoscaler":
            assert {metric["pods"]["metric"]["name"] for metric in one["spec"]["metrics"]} <= set(counted())


def test_dashboards_have_their_panels() -> None:
    """Each panel has queries, in two columns without overlap; invalid YAML would give an empty dashboard."""
    sources = {yaml.safe_load(path.read_text())["title"]: path for path in (CHART / "dashboards").iterdir()}
    assert len(sources) == 3
    by_title = {board["title"].removesuffix(": demo-tandem in llm"): board for board in boards()}
    assert set(by_title) == set(sources)
    for title, board in by_title.items():
        wanted = yaml.safe_load(sources[title].read_text())["panels"]
        assert [panel["title"] for panel in board["panels"]] == [panel["title"] for panel in wanted]
        assert all(panel["targets"] for panel in board["panels"])
        places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
        assert len(places) == len(board["panels"])


def test_the_dashboards_of_two_releases_stand_beside_each_other() -> None:
    """Grafana's sidecar has one folder for those of all namespaces; equal uids or titles there switch its provisioning
    off."""
    values = {**example("laptop"), "prometheus": {"dashboards": True}}
    found = []
    for name, namespace in (("demo", "llm"), ("demo", "staging"), ("other", "llm"), ("x" * 38, "llm")):
        text = texts(values, name, namespace)["tandem/templates/dashboards.yaml"]
        for one in filter(None, yaml.safe_load_all(text)):
            found += [(file, json.loads(board)) for file, board in one["data"].items()]
    assert len({file for file, _ in found}) == 12
    assert len({board["uid"] for _, board in found}) == 12
    assert len({board["title"] for _, board in found}) == 12
    assert all(len(board["uid"]) <= 40 for _, board in found)  # Grafana's bound


@pytest.mark.parametrize(
    "query",
    ["tandem_request_total", "tandem_queue_depth_total", 'sum(rate(tandem_requests_total{status="ok"}[5m]))'],
)
def test_the_check_finds_a_name_that_nobody_counts(query: str) -> None:
    """Control: a metric that does not exist is found."""
    assert any(name not in counted() or not labels <= counted()[name] for name, labels in asked(query))


def test_what_stands_in_the_alerts_are_values_that_the_code_has() -> None:
    """An alert with a misspelt result, state or outcome would never fire."""
    said = {(label, value) for query in queries() for label, value in re.findall(r'(\w+)="([\w]+)"', query)}
    values = {value for label, value in said if label in ("result", "state", "outcome", "pool")}
    assert values == {"failed", "refused", "ready", "router", "prefill", "decode"}
    kinds = {value for label, value in said if label == "kind"}
    reasons = {
        reason
        for query in queries()
        for found in re.findall(r'reason=~"([^"]+)"', query)
        for reason in found.split("|")
    }
    code = "".join(path.read_text() for folder in ("tandem", "services") for path in (ROOT / folder).rglob("*.py"))
    assert kinds
    assert reasons
    assert all(f'"{value}"' in code for value in kinds | reasons)
    source = "".join((ROOT / f"tandem/telemetry/{name}.py").read_text() for name in ("metrics", "outcomes"))
    assert all(f'"{value}"' in source for value in ("failed", "refused", "ready", "ok", "router"))


def test_the_edge_of_an_objective_is_one_that_is_served() -> None:
    """`le` is compared as text: 1 s is "1.0"."""
    settings = Settings(model="m")
    router = RouterMetrics(settings, "r", lambda: 0)
    router._ttft.labels("local").observe(0.2)
    text = router.text().decode()
    for seconds in (0.2, 0.3, 0.75, 1.0, 1.5, 2.0, 2.5, 0.05, 10.0):
        documents = render({**example("rdma"), "slo": {"ttft_s": seconds}})
        (rule,) = [one for one in documents if one["kind"] == "PrometheusRule"]
        burns = [one["expr"] for one in rule["spec"]["groups"][0]["rules"] if one["alert"] == "TandemTtftBudgetBurn"]
        edges = {edge for expr in burns for edge in re.findall(r'le="([^"]+)"', expr)}
        assert len(edges) == 1
        assert f'le="{edges.pop()}"' in text


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    """A page has what the alert means, where to look and what to do."""
    pages = {rule["annotations"]["runbook_url"] for rule in rules()}
    assert pages == {f"docs/runbooks/{path.name}" for path in RUNBOOKS.glob("*.md") if path.name != "README.md"}
    for rule in rules():
        text = (ROOT / rule["annotations"]["runbook_url"]).read_text()
        assert text.startswith(f"# {rule['alert']}\n")
        assert all(section in text for section in SECTIONS), rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        # A sum has no labels, and the alerts of two releases must be distinct.
        assert (rule["labels"]["namespace"], rule["labels"]["tandem"]) == ("llm", "demo-tandem")


def test_the_page_of_a_full_registry_names_the_value_that_bounds_it() -> None:
    """With more memory for its pod alone, Valkey refuses writes at the same size."""
    named = re.search(r"more memory: `valkey\.(\w+)`", (RUNBOOKS / "registry-full.md").read_text())
    assert named
    documents = render({**example("laptop"), "valkey": {named[1]: "2gb"}})
    (valkey,) = [one for one in documents if one["kind"] == "StatefulSet"]
    args = valkey["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--maxmemory") + 1] == "2gb"


def test_pages_name_what_every_release_has() -> None:
    """With several models pools have other names, with Ray their Deployments have no pods, and each of several routers
    has its own log and receipts. Weights are in workers."""
    for page in RUNBOOKS.glob("*.md"):
        text = page.read_text()
        assert not re.search(r"deploy/\$T-(prefill|decode)", text), page.name
        assert not re.search(r"logs deploy/\$T-router \|", text), page.name
        assert text.count("tandem plan") == text.count("-c worker -- tandem plan"), page.name
        assert not re.search("tandem (explain|slow|calibration)", text) or "each router's pod" in text, page.name


def test_only_pools_with_rdma_are_told_that_kv_moves_over_tcp() -> None:
    """Without RDMA, TCP is intended."""

    def alerts(name: str) -> set[str]:
        found = [one for one in render(example(name)) if one["kind"] == "PrometheusRule"]
        return {rule["alert"] for rule in found[0]["spec"]["groups"][0]["rules"]}

    assert "TandemKvOverTcp" in alerts("rdma")
    assert "TandemKvOverTcp" not in alerts("one-node")


def test_only_releases_with_ray_are_told_of_a_supervisor() -> None:
    """With `orchestrator: kubernetes` there is none, and its metric is 0."""
    of_ray = {"TandemNoSupervisor", "TandemPoolShort"}
    values = {**example("laptop"), "prometheus": {"rules": True}}
    for orchestrator, expected in (("ray", of_ray), ("kubernetes", set())):
        documents = render({**values, "orchestrator": orchestrator})
        (rule,) = [one for one in documents if one["kind"] == "PrometheusRule"]
        assert {one["alert"] for one in rule["spec"]["groups"][0]["rules"]} & of_ray == expected
