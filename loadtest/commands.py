"""`python -m loadtest NAME ...`: every measurement behind one command.

A measurement's module is imported when its name is on the command line, so that `--help` loads no torch.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from inspect import getdoc
from typing import Any

import typer
from typer.core import TyperGroup

from loadtest.harness.interrupts import unwinding
from loadtest.harness.options import expanded
from tandem.errors import TandemError

PROGRAM = "python -m loadtest"
STOPPED = 130


@dataclass(frozen=True)
class Measurement:
    """`where` is module:function within loadtest."""

    where: str
    summary: str

    def load(self) -> tuple[Callable[..., Any], str]:
        """The function, and its help: its docstring, or that of its module."""
        path, _, name = self.where.partition(":")
        module = import_module(f"loadtest.{path}")
        function = getattr(module, name)
        return function, getdoc(function) or getdoc(module) or ""


ROOMS: dict[str, dict[str, Measurement]] = {
    "Load on any server": {
        "run": Measurement("loadgen.load:run", "one load at a given rate or from a trace"),
        "search": Measurement("loadgen.load:search", "the highest rate that keeps the objective"),
        "compare": Measurement("loadgen.load:compare", "two reports, or two servers in turn"),
    },
    "This machine": {
        "machine": Measurement("harness.machine:main", "peaks of products and reading, and the floors that follow"),
    },
    "One part (microbench)": {
        "bench": Measurement("bench:main", "`make bench`: step, link, hop, ttft, spec, telemetry, or --only some"),
        "links": Measurement("microbench.link_failures:main", "links that fail again and again: what remains of them"),
        "attention": Measurement("microbench.attention:main", "attention of one layer, also with quantised KV"),
        "machine-code": Measurement("microbench.machine_code:main", "GPU kernels as machine code, without a GPU"),
        "prefill": Measurement("microbench.prefill:main", "a prompt of 512 tokens, by format of the weights"),
        "products": Measurement("microbench.products:main", "linear layers of one step, by number of rows"),
        "ranks": Measurement("microbench.ranks:main", "a worker of several ranks against one of several threads"),
        "recurrence": Measurement("microbench.recurrence:main", "one recurrent layer, compared with transformers"),
        "mixture": Measurement("microbench.mixture:main", "steps of a mixture of experts, compared with transformers"),
        "quality": Measurement("microbench.quality:main", "quantised weights or KV: agreement of the answers"),
        "families": Measurement("microbench.families:main", "every model type of transformers: served or refused"),
        "adapters": Measurement("microbench.adapters:main", "LoRA adapters: seconds of a step with and without"),
        "device-kernels": Measurement("microbench.device_kernels:main", "a GPU's kernels against what they must equal"),
        "device": Measurement("microbench.device:main", "a GPU's steps and prefill as shares of its own floors"),
    },
    "A whole cluster (scenarios)": {
        "prefix": Measurement("scenarios.prefix:main", "placing by cached prefix, on conversations of a trace"),
        "breakeven": Measurement("scenarios.breakeven:main", "whether the router chooses the faster prefill path"),
        "overload": Measurement("scenarios.overload:main", "goodput at three times the capacity"),
        "burst": Measurement("scenarios.burst:main", "the autoscaler compared with fixed pools, on a trace's burst"),
        "ray-autoscale": Measurement("scenarios.ray_nodes.autoscale:main", "Ray's autoscaler: nodes join and leave"),
        "scale": Measurement("scenarios.scale:main", "router with 1,000 workers: placing, refreshing, a long queue"),
        "abuse": Measurement("scenarios.abuse:main", "latency of a polite client during each abuse by another"),
        "blocking": Measurement("scenarios.blocking.run:main", "how long large bodies hold a router's event loop"),
        "hosts": Measurement("scenarios.hosts.run:main", "three hosts (namespaces): loss, delay, cuts, a lost head"),
        "device-handoff": Measurement("scenarios.device_handoff:main", "a GPU's handoff, against one worker alone"),
        "chaos": Measurement("scenarios.chaos.run:main", "random faults under load: no answer may differ by a token"),
    },
    "Other software (comparison)": {
        "goodput": Measurement("comparison.rate_search:main", "the highest rate of systems, one after another"),
        "peers": Measurement("comparison.peers:main", "vLLM and other engines in turn (`make peers`)"),
    },
}  # fmt: skip


class Rooms(TyperGroup):
    """Lists the commands by room."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for room, measurements in ROOMS.items():
            with formatter.section(room):
                formatter.write_dl([(name, measurement.summary) for name, measurement in measurements.items()])


def application(chosen: str | None) -> typer.Typer:
    """The command line. Only the chosen measurement has its options: the modules of the others are not imported."""
    app = typer.Typer(
        cls=Rooms,
        help="Load tests and measurements of Tandem. NAME --help shows the options of one.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        result_callback=_end,
    )
    for measurements in ROOMS.values():
        for name, measurement in measurements.items():
            if name == chosen:
                function, text = measurement.load()
                app.command(name, help=_preformatted(text))(_guarded(expanded(function)))
            else:
                app.command(name, help=measurement.summary)(_not_chosen)
    return app


def main(arguments: list[str]) -> int:
    """Returns the exit code: 1 for an error, 2 for a wrong command line, 130 when it was stopped."""
    try:
        application(arguments[0] if arguments else None)(arguments, prog_name=PROGRAM, obj=arguments)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    return 0


def _not_chosen() -> None:
    raise AssertionError("the command line names another measurement")


def _end(code: int | None) -> None:
    raise typer.Exit(code or 0)


def _preformatted(text: str) -> str:
    """With the mark that keeps the lines of each paragraph as they are."""
    return "\n\n".join(f"\b\n{paragraph}" for paragraph in text.strip().split("\n\n"))


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """With one way out for every error."""

    def run(**options: Any) -> int | None:
        try:
            with unwinding():
                code: int | None = function(**options)
                return code
        except TandemError as error:
            print(f"error: {error.message}", file=sys.stderr)
            return 1
        except subprocess.TimeoutExpired as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("stopped; nothing was left running", file=sys.stderr)
            return STOPPED

    run.__signature__ = function.__signature__  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run
