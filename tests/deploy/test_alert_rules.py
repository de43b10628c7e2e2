"""Each alert of the chart fires for its condition, and not for a healthy cluster. Evaluated by Prometheus's own
promtool, over series as the processes export them."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import render
from tests.deploy.test_signals import rules

PROMTOOL = shutil.which("promtool")
OF = 'namespace="llm",tandem="demo-tandem"'
WINDOWS = ("1h", "6h", "1d", "3d")


def series(name: str, labels: str, values: str) -> dict[str, str]:
    return {"series": f"{name}{{{OF},{labels}}}", "values": values}


def grows(per_minute: float, minutes: int = 60) -> str:
    return f"0+{per_minute}x{minutes}"


def stays(value: float | str, minutes: int = 60) -> str:
    return f"{value}x{minutes}"


def requests(minutes: int = 60, **outcomes: float) -> list[dict[str, str]]:
    """Requests per minute, by outcome; the reason of refusals is the cluster's, that of `invalid` ones the client's."""
    about = {
        "ok": 'outcome="ok",reason=""',
        "failed": 'outcome="failed",reason="WORKER_LOST"',
        "overloaded": 'outcome="refused",reason="OVERLOADED"',
        "limited": 'outcome="refused",reason="TENANT_TOKENS"',
        "invalid": 'outcome="refused",reason="INVALID_REQUEST"',
    }
    return [
        series("tandem_requests_total", f'pool="router",worker="r-0",{about[kind]}', grows(rate, minutes))
        for kind, rate in outcomes.items()
    ]


def histogram(name: str, edge: str, total: float, good: float, minutes: int) -> list[dict[str, str]]:
    who = 'pool="router",worker="r-0"'
    return [
        series(f"{name}_bucket", f'{who},le="{edge}"', grows(good, minutes)),
        series(f"{name}_count", who, grows(total, minutes)),
    ]


def models(pool: str, name: str, more: str = "", **values: float | tuple[float, ...]) -> list[dict[str, str]]:
    """A gauge for each worker of each model."""
    found = []
    for model, value in values.items():
        of_each = value if isinstance(value, tuple) else (value,)
        found += of(pool, name, *of_each, more=f'{more},model="{model}"')
    return found


def of(pool: str, name: str, *values: float | str, more: str = "") -> list[dict[str, str]]:
    """A gauge for each worker."""
    return [
        series(name, f'pool="{pool}",worker="{pool}-{number}"{more}', value if isinstance(value, str) else stays(value))
        for number, value in enumerate(values)
    ]


READY = ',state="ready"'
TRANSFER = 'pool="decode",worker="decode-0",reason="",result='
BYTES = 'pool="decode",worker="decode-0",transport='
MEMORY = "tandem_registry_memory"
DAYS = 3 * 24 * 60 + 60
TTFT, TPOT = "tandem_time_to_first_token_seconds", "tandem_time_per_output_token_seconds"


@dataclass(frozen=True)
class Case:
    alert: str
    what: str
    given: list[dict[str, str]]
    windows: tuple[str, ...] | None  # of an error budget, those that fire; () or None: none
    fires: bool = False
    at: str = "1h"
    model: str = ""  # that the alert names
    role: str = ""  # likewise


def case(alert: str, what: str, given: list[dict[str, str]], fires: bool, model: str = "", role: str = "") -> Case:
    return Case(alert, what, given, None, fires, model=model, role=role)


def sizes(ready: float | str, wanted: float, role: str = "decode") -> list[dict[str, str]]:
    """As each of two routers knows them."""
    more = f',role="{role}"'
    ready_of_both = of("router", "tandem_ready_workers", ready, ready, more=more)
    return ready_of_both + of("router", "tandem_wanted_workers", wanted, wanted, more=more)


def burn(alert: str, what: str, given: list[dict[str, str]], *windows: str) -> Case:
    return Case(alert, what, given, windows, bool(windows), f"{DAYS}m")


CASES = [
    case("TandemNoRouter", "none", of("decode", "tandem_build_info", 1), True),
    case("TandemNoRouter", "one", of("router", "tandem_build_info", 1), False),
    case("TandemNoDecodeWorker", "none is ready", of("decode", "tandem_worker_state", 0, 0, more=READY), True),
    case("TandemNoDecodeWorker", "none is there", of("prefill", "tandem_worker_state", 1, more=READY), True),
    case("TandemNoDecodeWorker", "one of two", of("decode", "tandem_worker_state", 0, 1, more=READY), False),
    *(
        case(alert, "the former model drains", models(pool, "tandem_worker_state", READY, former=(0, 0), m=1), False)
        for alert, pool in (("TandemNoDecodeWorker", "decode"), ("TandemNoPrefillWorker", "prefill"))
    ),
    *(
        case(alert, "one of two models", models(pool, name, chat=(high, high), small=(0, 0, 0)), True, "chat")
        for alert, pool, name, high in (
            ("TandemPrefillBacklog", "prefill", "tandem_prefill_backlog_seconds", 20.0),
            ("TandemKvFull", "decode", "tandem_kv_cache_usage_ratio", 0.99),
            ("TandemPlacesFull", "decode", "tandem_places_usage_ratio", 1.0),
        )
    ),
    case(
        "TandemQueue", "most of one of two models",
        models("router", "tandem_queue_depth", chat=30, small=0)
        + models("decode", "tandem_inflight_requests", chat=(5, 5), small=400), True, "chat",
    ),
    case("TandemNoPrefillWorker", "none is ready", of("prefill", "tandem_worker_state", 0, more=READY), True),
    case("TandemNoPrefillWorker", "one", of("prefill", "tandem_worker_state", 1, more=READY), False),
    case("TandemNoSupervisor", "no router knows one", of("router", "tandem_supervisor_up", 0, 0), True),
    case("TandemNoSupervisor", "one of two routers knows it", of("router", "tandem_supervisor_up", 0, 1), False),
    case("TandemNoSupervisor", "not known", of("router", "tandem_registry_up", 0), False),
    case("TandemPoolShort", "one of two", sizes(1, 2) + sizes(3, 3, "prefill"), True, role="decode"),
    case("TandemPoolShort", "none at all", sizes(3, 3) + sizes(0, 1, "prefill"), True, role="prefill"),
    case("TandemPoolShort", "all, one pool more", sizes(2, 2) + sizes(4, 1, "prefill"), False),
    case("TandemPoolShort", "for ten minutes", sizes("2x49 1x11", 2), False),
    case("TandemPrefillBacklog", "on average", of("prefill", "tandem_prefill_backlog_seconds", 4, 30), True),
    case("TandemPrefillBacklog", "of one of three", of("prefill", "tandem_prefill_backlog_seconds", 20, 1, 1), False),
    case("TandemKvFull", "all", of("decode", "tandem_kv_cache_usage_ratio", 0.99, 0.97), True),
    case("TandemKvFull", "one of two", of("decode", "tandem_kv_cache_usage_ratio", 1.0, 0.5), False),
    case("TandemPlacesFull", "all", of("decode", "tandem_places_usage_ratio", 1.0, 0.98), True),
    case("TandemPlacesFull", "one of two", of("decode", "tandem_places_usage_ratio", 1.0, 0.5), False),
    case(
        "TandemQueue", "more wait than run",
        of("router", "tandem_queue_depth", 20, 10) + of("decode", "tandem_inflight_requests", 15, 10), True,
    ),
    case(
        "TandemQueue", "one of the eight answers of each of ten requests",
        of("router", "tandem_queue_depth", 10) + of("router", "tandem_inflight_requests", 10)
        + of("decode", "tandem_inflight_requests", 70), False,
    ),
    case(
        "TandemQueue", "nobody is there",
        of("router", "tandem_queue_depth", 0) + of("decode", "tandem_inflight_requests", 0), False,
    ),
    case(
        "TandemPreemptions", "one for two requests",
        requests(ok=60) + of("decode", "tandem_preemptions_total", grows(30)), True,
    ),
    case(
        "TandemPreemptions", "one for a hundred",
        requests(ok=60) + of("decode", "tandem_preemptions_total", grows(0.6)), False,
    ),
    case(
        "TandemKvTransferFailures", "one in ten",
        [series("tandem_kv_transfers_total", f'{TRANSFER}"ok"', grows(90)),
         series("tandem_kv_transfers_total", f'{TRANSFER}"failed"', grows(10))], True,
    ),
    case(
        "TandemKvTransferFailures", "many that nobody needed any more",
        [series("tandem_kv_transfers_total", f'{TRANSFER}"ok"', grows(900)),
         series("tandem_kv_transfers_total", f'{TRANSFER}"cancelled"', grows(500)),
         series("tandem_kv_transfers_total", f'{TRANSFER}"failed"', grows(1))], False,
    ),
    case(
        "TandemKvOverTcp", "some",
        [series("tandem_kv_transfer_bytes_total", f'{BYTES}"nixl:ucx:tcp"', grows(1e6))], True,
    ),
    case(
        "TandemKvOverTcp", "all over RDMA",
        [series("tandem_kv_transfer_bytes_total", f'{BYTES}"nixl:ucx:rc_mlx5"', grows(1e6)),
         series("tandem_kv_transfer_bytes_total", f'{BYTES}"nixl:ucx:tcp"', stays(5e6))], False,
    ),
    case("TandemRetries", "one in ten", requests(ok=60) + of("router", "tandem_retries_total", grows(6)), True),
    case("TandemRetries", "few", requests(ok=60) + of("router", "tandem_retries_total", grows(0.6)), False),
    case("TandemRefusals", "nearly all", requests(ok=0.1, overloaded=60), True),
    case("TandemRefusals", "one in twenty", requests(ok=57, overloaded=3), False),
    case("TandemRefusals", "what clients and tenants did wrong", requests(ok=60, invalid=60, limited=300), False),
    case("TandemRefusals", "two requests in all", requests(ok=0.01, overloaded=0.05), False),
    case("TandemRegistryLost", "two of three", of("decode", "tandem_registry_up", 0, 0, 1), True),
    case("TandemRegistryLost", "one of three", of("decode", "tandem_registry_up", 0, 1, 1), False),
    case(
        "TandemRegistryFull", "nearly",
        of("router", f"{MEMORY}_used_bytes", 950) + of("router", f"{MEMORY}_limit_bytes", 1000),
        True,
    ),
    case(
        "TandemRegistryFull", "half",
        of("router", f"{MEMORY}_used_bytes", 500) + of("router", f"{MEMORY}_limit_bytes", 1000),
        False,
    ),
    case("TandemRegistryFull", "no limit", of("router", f"{MEMORY}_used_bytes", 1e12), False),
    burn("TandemErrorBudgetBurn", "one in ten fails", requests(DAYS, ok=54, failed=6), *WINDOWS),
    burn("TandemErrorBudgetBurn", "four in a thousand", requests(DAYS, ok=9960, failed=40), "1d", "3d"),
    burn("TandemErrorBudgetBurn", "within the objective", requests(DAYS, ok=9995, failed=5, overloaded=5000)),
    burn("TandemErrorBudgetBurn", "too few to tell", requests(DAYS, ok=0, failed=0.004)),
    burn(
        "TandemTtftBudgetBurn", "most are late",
        requests(DAYS, ok=60) + histogram(TTFT, "2.5", 60, 6, DAYS), *WINDOWS,
    ),
    burn(
        "TandemTtftBudgetBurn", "few clients among many jobs",
        requests(DAYS, ok=60) + histogram(TTFT, "2.5", 0.004, 0, DAYS),
    ),
    burn("TandemTtftBudgetBurn", "few are late", requests(DAYS, ok=60) + histogram(TTFT, "2.5", 60, 59, DAYS)),
    burn(
        "TandemTpotBudgetBurn", "most are slow",
        requests(DAYS, ok=60) + histogram(TPOT, "0.1", 60, 6, DAYS), *WINDOWS,
    ),
    burn("TandemTpotBudgetBurn", "few are slow", requests(DAYS, ok=60) + histogram(TPOT, "0.1", 60, 59, DAYS)),
]  # fmt: skip


def expected(one: Case, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The alerts that must fire, in the form that promtool compares."""
    if not one.fires:
        return []
    wanted = [rule for rule in known if rule["alert"] == one.alert]
    if one.windows is not None:
        wanted = [rule for rule in wanted if rule["labels"]["window"] in one.windows]
    more = {name: value for name, value in (("model", one.model), ("role", one.role)) if value}
    return [{"exp_labels": rule["labels"] | more, "exp_annotations": rule["annotations"]} for rule in wanted]


def written(folder: Path, cases: list[Case], known: list[dict[str, Any]]) -> list[Path]:
    """Writes for each alert the file of its rules and the file of its tests. An error budget has no `for`, so it is
    evaluated once, at the end of its days."""
    files = []
    for alert in sorted({one.alert for one in cases}):
        mine = [one for one in cases if one.alert == alert]
        tests = [
            {
                "interval": "1m",
                "name": f"{alert}: {one.what}",
                "input_series": one.given,
                "alert_rule_test": [{"eval_time": one.at, "alertname": alert, "exp_alerts": expected(one, known)}],
            }
            for one in mine
        ]
        every = "1m" if mine[0].windows is None else mine[0].at
        own = [rule for rule in known if rule["alert"] == alert]
        (folder / f"{alert}.rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "tandem", "rules": own}]}))
        files.append(folder / f"{alert}.yaml")
        about = {"rule_files": [f"{alert}.rules.yaml"], "evaluation_interval": every, "tests": tests}
        files[-1].write_text(yaml.safe_dump(about))
    return files


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if PROMTOOL is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    return subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def known_rules() -> list[dict[str, Any]]:
    return list({(rule["alert"], rule["labels"].get("window")): rule for rule in rules()}.values())


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    """This holds for an alert that is added later, too."""
    for fires in (True, False):
        assert {one.alert for one in CASES if one.fires is fires} == {rule["alert"] for rule in rules()}


def test_each_alert_fires_for_what_it_is_about_and_for_nothing_else(tmp_path: Path) -> None:
    """Each alert fires with its labels and its page; an error budget fires in the windows in which it burns."""
    done = promtool("test", "rules", *written(tmp_path, CASES, known_rules()))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert promtool("check", "rules", *tmp_path.glob("*.rules.yaml")).returncode == 0


def test_a_model_whose_pool_reports_nothing_is_missed(tmp_path: Path) -> None:
    """Of several models one may have no pod at all, such as one that no node has room for. A model without a prefill
    pool misses none, and names are those that the model is served as. A model that was removed, whose workers drain, is
    not missed."""
    small = {"name": "small", "settings": {"model": "s", "served_model_name": "little,tiny"}}
    alone = {"name": "alone", "settings": {"model": "a"}, "pools": {"prefill": {"replicas": 0}}}
    chat = {"name": "chat", "settings": {"model": "c"}}
    documents = render({"settings": {}, "models": [chat, small, alone], "prometheus": {"rules": True}})
    (rule,) = [one for one in documents if one["kind"] == "PrometheusRule"]
    known = rule["spec"]["groups"][0]["rules"]
    cases = []
    for alert, pool, others in (
        ("TandemNoDecodeWorker", "decode", {"chat": 1, "alone": 1}),
        ("TandemNoPrefillWorker", "prefill", {"chat": 1}),
    ):
        there = models(pool, "tandem_worker_state", READY, **others)
        all_there = models(pool, "tandem_worker_state", READY, **others, little=1)
        none_ready = models(pool, "tandem_worker_state", READY, **others, little=(0, 0))
        removed = models(pool, "tandem_worker_state", READY, **others, little=1, former=0)
        cases += [
            case(alert, "all", all_there, False),
            case(alert, "one is gone", there, True, "little"),
            case(alert, "none of one is ready", none_ready, True, "little"),
            case(alert, "removed", removed, False),
        ]
    done = promtool("test", "rules", *written(tmp_path, cases, known))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_each_model_needs_a_supervisor_and_a_removed_one_does_not(tmp_path: Path) -> None:
    """Each model has its own, so that of another one must not hide its loss. Former routers still tell of a model that
    was removed, whose supervisor has ended."""
    two = [{"name": name, "settings": {"model": name}} for name in ("chat", "small")]
    documents = render({"settings": {}, "models": two, "prometheus": {"rules": True}})
    (rule,) = [one for one in documents if one["kind"] == "PrometheusRule"]
    up, sizes_of = "tandem_supervisor_up", ("tandem_ready_workers", "tandem_wanted_workers")
    ready, wanted = (
        models("router", name, ',role="decode"', chat=2, small=size, former=size)
        for name, size in zip(sizes_of, (0, 2), strict=True)
    )
    cases = [
        case("TandemNoSupervisor", "one of two", models("router", up, chat=1, small=0), True, "small"),
        case("TandemNoSupervisor", "removed", models("router", up, chat=1, small=1, former=0), False),
        case("TandemPoolShort", "of one of two, and removed", ready + wanted, True, "small", "decode"),
    ]
    done = promtool("test", "rules", *written(tmp_path, cases, rule["spec"]["groups"][0]["rules"]))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_only_models_whose_pools_have_rdma_are_told_of_tcp() -> None:
    """Of several models, one without RDMA moves its KV over TCP as it should."""
    fast = {"pools": {pool: {"rdma": {"count": 1}} for pool in ("prefill", "decode")}}
    large, small = {"name": "large", "settings": {"model": "l"}, **fast}, {"name": "small", "settings": {"model": "s"}}

    def selected(**values: Any) -> list[str]:
        documents = render({**values, "prometheus": {"rules": True}})
        (rule,) = [one for one in documents if one["kind"] == "PrometheusRule"]
        found = [one["expr"] for one in rule["spec"]["groups"][0]["rules"] if one["alert"] == "TandemKvOverTcp"]
        return [expr.partition('transport=~".*tcp"')[2] for expr in found]

    assert selected(settings={}, models=[large, small]) == [',model=~"large"}[10m])) > 0']
    assert selected(settings={"model": "l"}, **fast) == ["}[10m])) > 0"]
    assert selected(settings={}, models=[small]) == []


def test_no_alert_misses_a_pool_that_nobody_wants() -> None:
    """Where decode workers compute all prompts, no prefill worker is expected. The control: one model has a pool."""

    def alerts(values: dict[str, Any]) -> set[str]:
        documents = render({**values, "prometheus": {"rules": True}})
        (rule,) = [one for one in documents if one["kind"] == "PrometheusRule"]
        return {one["alert"] for one in rule["spec"]["groups"][0]["rules"]}

    none: dict[str, Any] = {"pools": {"prefill": {"replicas": 0}}}
    own: dict[str, Any] = {"settings": {"model": "m"}}
    with_pool = alerts(own)
    assert alerts(own | none) == with_pool - {"TandemNoPrefillWorker"} != with_pool
    first, second = ({"name": name, **own, **none} for name in ("a", "b"))
    assert alerts({"settings": {}, "models": [first, second]}) == with_pool - {"TandemNoPrefillWorker"}
    assert alerts({"settings": {}, "models": [first, {"name": "b", **own}]}) == with_pool


@pytest.mark.parametrize(
    "alert", ["TandemRefusals", "TandemRegistryLost", "TandemKvFull", "TandemNoSupervisor", "TandemPoolShort"]
)
def test_control_an_alert_with_another_bound_is_found(tmp_path: Path, alert: str) -> None:
    """Control: an alert that always fires and one that never fires are found."""
    cases = [one for one in CASES if one.alert == alert]
    for expression in ("vector(1)", "vector(1) > 2"):
        known = [{**rule, "expr": expression} if rule["alert"] == alert else rule for rule in known_rules()]
        done = promtool("test", "rules", *written(tmp_path, cases, known))
        assert done.returncode
        assert "FAILED" in done.stdout + done.stderr
