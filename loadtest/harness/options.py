"""Options that several measurements share, each declared once, and how a measurement declares its own.

A measurement is a function whose parameters are its options, as typer reads them. A parameter whose type is a dataclass
stands for all of that dataclass's fields.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer


def positive(value: Any) -> Any:
    """For `callback`: a number above 0, or none. Raises BadParameter."""
    if value is not None and not 0 < value < 1e9:
        raise typer.BadParameter(f"{value} is not above 0")
    return value


def _real_shape(name: str) -> str:
    from loadtest.harness.random_checkpoints import REAL  # needs torch, which clients of a distant server do not

    if name not in REAL:
        raise typer.BadParameter(f"{name}: not one of {', '.join(REAL)}")
    return name


Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all results to FILE as JSON.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="The smallest run, to test the command: its numbers mean nothing.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="Seed of all random choices.")]
Rounds = Annotated[int, typer.Option(metavar="N", min=1, help="Rounds in which the sides take turns.")]
Repeats = Annotated[int, typer.Option(metavar="N", min=1, help="Measurements of each side, in turn.")]
Threads = Annotated[int, typer.Option(metavar="N", min=1, help="Threads of the operators.")]
Seconds = Annotated[float, typer.Option(metavar="S", help="Length of each measurement.", callback=positive)]
AtOnce = Annotated[int, typer.Option(metavar="N", min=1, help="Requests in progress at a time.")]
Ttft = Annotated[float, typer.Option(metavar="S", help="Objective: time to first token.", callback=positive)]
Tpot = Annotated[float, typer.Option(metavar="S", help="Objective: time per output token.", callback=positive)]
Shape = Annotated[
    str, typer.Option(metavar="SHAPE", help="Shape of the model; its weights are random.", callback=_real_shape)
]
Script = Annotated[Path | None, typer.Option(envvar="PEERS_SCRIPT", metavar="FILE", help="Script that starts vLLM.")]
Home = Annotated[
    Path, typer.Option(envvar="PEERS_HOME", metavar="FOLDER", help="Environments of the peers, and checkpoints.")
]
PEERS_HOME = Path("~/.cache/tandem-peers")


def names(text: str, known: Collection[str]) -> tuple[str, ...]:
    """The names in a list with commas. Raises BadParameter for one that is not known."""
    names = tuple(text.split(","))
    if wrong := sorted(set(names) - set(known)):
        raise typer.BadParameter(f"{', '.join(wrong)}: not one of {', '.join(known)}")
    return names


def numbers(text: str) -> tuple[int, ...]:
    """The whole numbers above 0 in a list with commas. Raises BadParameter."""
    parts = text.split(",")
    if wrong := [part for part in parts if not part.isdecimal() or int(part) < 1]:
        raise typer.BadParameter(f"{', '.join(wrong)}: not a whole number above 0")
    return tuple(map(int, parts))


def expanded(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as typer can read it: the fields of its dataclasses are parameters."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {}
    parameters = []
    for parameter in signature(function).parameters.values():
        hint = hints[parameter.name]
        if is_dataclass(hint):
            groups[parameter.name] = hint
            parameters += _fields(hint)
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hint))

    def call(**values: Any) -> Any:
        own = {
            name: group(**{option.name: values.pop(option.name) for option in fields(group)})
            for name, group in groups.items()
        }
        return function(**values, **own)

    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {}
    call.__doc__ = function.__doc__
    return call


def _fields(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
