"""The operator's commands: `tandem workers`, `scale`, `autoscale`, `drain`, `adapters`, `audit`, `doctor`, `explain`,
`slow`, `calibration`."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from cli.output import DEFAULT_TARGET, JSON, TEXT, Output, Target, connected, display, print_json
from tandem.errors import NotFound

app = typer.Typer()
adapters_app = typer.Typer(
    help="List the adapters of a cluster, and load and unload them while it runs.", no_args_is_help=True
)
app.add_typer(adapters_app, name="adapters")


@app.command()
def workers(target: Target = DEFAULT_TARGET, output: Output = TEXT) -> None:
    """List the workers: role, state, process, load and KV use."""
    with connected(target) as client:
        from cli import rendering

        answer = client.workers()
        print_json(answer.to_dict()) if output is JSON else display(rendering.pools(answer))


@app.command()
def scale(
    sizes: Annotated[list[str], typer.Argument(metavar="[MODEL/]prefill=N [MODEL/]decode=N")],
    target: Target = DEFAULT_TARGET,
    output: Output = TEXT,
) -> None:
    """Set how many workers of a role are wanted; the cluster starts or drains workers until it has them."""
    wanted: dict[str, int] = {}
    for pool, size in map(_parse_size, sizes):
        if pool in wanted:
            raise typer.BadParameter("name each pool once")
        wanted[pool] = size
    with connected(target) as client:
        from cli import rendering

        answer = client.scale(pools=wanted)
        print_json({"wanted": answer}) if output is JSON else print(f"wanted: {rendering.wanted(answer)}")


def _parse_size(text: str) -> tuple[str, int]:
    """Pool and size."""
    pool, _, number = text.partition("=")
    if pool.rpartition("/")[2] not in ("prefill", "decode") or not number.isdecimal():
        raise typer.BadParameter(f"{text!r} is not prefill=N or decode=N, with MODEL/ before it where needed")
    return pool, int(number)


@app.command()
def autoscale(target: Target = DEFAULT_TARGET, output: Output = TEXT) -> None:
    """Show how many workers the autoscaler wants, and why."""
    with connected(target) as client:
        from cli import rendering

        answer = client.autoscaling()
        print_json(answer.to_dict()) if output is JSON else display(rendering.autoscaling(answer))


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="An id that `tandem workers` shows.")],
    grace: Annotated[float, typer.Option(metavar="SECONDS", help="How long its requests may still take.")] = 30.0,
    target: Target = DEFAULT_TARGET,
    output: Output = TEXT,
) -> None:
    """Stop a worker after its requests; those that outlast the grace go on elsewhere. Returns when it is drained."""
    with connected(target) as client:
        answer = client.drain(worker, grace)
        if output is JSON:
            print_json(answer.to_dict())
        else:
            print(f"{worker} is drained: {answer.finished} requests finished, {answer.cut} went on elsewhere")


@adapters_app.command("list")
def adapters_list(target: Target = DEFAULT_TARGET, output: Output = TEXT) -> None:
    """List the adapters that requests may name."""
    with connected(target) as client:
        from cli import rendering

        answer = client.adapters()
        print_json([one.to_dict() for one in answer]) if output is JSON else display(rendering.adapters(answer))


@adapters_app.command("load")
def adapters_load(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Within the cluster's adapter_root.")],
    model: Annotated[str, typer.Option(metavar="NAME", help="For which of the cluster's models.")] = "",
    target: Target = DEFAULT_TARGET,
    output: Output = TEXT,
) -> None:
    """Load an adapter on every worker; if one of them cannot, on none."""
    with connected(target) as client:
        answer = client.load_adapter(name, folder, model=model)
        print_json(answer.to_dict()) if output is JSON else print(f"{name} is loaded from {folder}")


@adapters_app.command("unload")
def adapters_unload(
    name: Annotated[str, typer.Argument(metavar="NAME")], target: Target = DEFAULT_TARGET, output: Output = TEXT
) -> None:
    """Unload an adapter; requests that it has already admitted finish."""
    with connected(target) as client:
        client.unload_adapter(name)
        print_json({"unloaded": name}) if output is JSON else print(f"{name} is unloaded")


@app.command()
def audit(target: Target = DEFAULT_TARGET, output: Output = TEXT) -> None:
    """Show who owns every KV block of every worker. Fails unless free + held + cached = total everywhere."""
    with connected(target) as client:
        from cli import rendering

        answer = client.audit()
        print_json({**answer.to_dict(), "balanced": answer.balanced}) if output is JSON else display(
            rendering.audit(answer)
        )
        raise typer.Exit(0 if answer.balanced else 1)


@app.command()
def doctor(target: Target = DEFAULT_TARGET, output: Output = TEXT) -> None:
    """Probe every prefill-decode pair, the registry and the versions. Fails if something needs a look."""
    with connected(target) as client:
        from cli import rendering
        from tandem.cluster_results import examine

        answer, workers = client.diagnose(), client.workers()
        findings = examine(answer, workers)
        if output is JSON:
            print_json({**answer.to_dict(), **findings.to_dict()})
        else:
            display(rendering.diagnosis(answer, findings))
        raise typer.Exit(1 if findings.problems else 0)


@app.command()
def explain(
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="An id of one of the last thousand requests.")],
    target: Target = DEFAULT_TARGET,
    output: Output = TEXT,
) -> None:
    """Show where a request went, what the router expected of that, and what came of it."""
    with connected(target) as client:
        from cli import receipt_rendering

        receipts = client.receipts(request)
        if not receipts:
            raise NotFound(
                f"this router remembers no request {request}; it keeps the last thousand, and of several routers each"
                " has its own: ask again, and another one may answer; within a router's pod only that router does",
                field="request",
            )
        if output is JSON:
            print_json([item.to_dict() for item in receipts])
            return
        for item in sorted(receipts, key=lambda item: item.choice):
            display(receipt_rendering.explained(item))


@app.command()
def slow(
    last: Annotated[str, typer.Option(metavar="TIME", help="As in 90s, 10m or 2h.")] = "1h",
    limit: Annotated[int, typer.Option(metavar="N", help="Maximum number of requests.", min=1)] = 10,
    target: Target = DEFAULT_TARGET,
    output: Output = TEXT,
) -> None:
    """List those of the last thousand requests that lost most time, what they lost it to, and what to do about it."""
    within = _parse_time(last)
    with connected(target) as client:
        from cli import latency_attribution, receipt_rendering

        attributions = latency_attribution.slowest(client.receipts(within=within), limit)
        if output is JSON:
            print_json([attribution.to_dict() for attribution in attributions])
            return
        if not attributions:
            raise NotFound(f"no request has ended at this router in the last {last}", field="last")
        display(receipt_rendering.slowest(attributions))


def _parse_time(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not match or not float(match[1]):
        raise typer.BadParameter(f"{text!r} is not a time such as 90s, 10m or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


@app.command()
def calibration(target: Target = DEFAULT_TARGET, output: Output = TEXT) -> None:
    """Show how good the router's estimates were, over the last thousand requests."""
    with connected(target) as client:
        from cli import receipt_rendering
        from tandem import calibration

        rows = calibration.calibration(client.receipts())
        if not rows:
            raise NotFound("no request with an estimate has ended at this router yet", field="requests")
        print_json([item.to_dict() for item in rows]) if output is JSON else display(
            receipt_rendering.calibration(rows)
        )
