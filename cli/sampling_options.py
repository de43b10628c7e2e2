"""The options of a command that are sampling parameters, as tandem.sampling declares them."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Annotated, Any, get_args

import typer

from tandem.sampling import OPTIONS, Cli


def with_sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` as typer can read it: the options stand where it takes a dict of them, `sampling`."""
    parameters: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        parameters += _options() if parameter.name == "sampling" else [parameter]
    names = {option.name for option in _options()}

    def call(**values: Any) -> Any:
        sampling = {name: values.pop(name) for name in names}
        if sampling["logit_bias"]:
            sampling["logit_bias"] = dict(map(_parse_bias, sampling["logit_bias"]))
        return command(**values, sampling=sampling)

    call.__signature__ = signature(command).replace(  # type: ignore[attr-defined]
        parameters=[parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    call.__doc__, call.__name__ = command.__doc__, command.__name__
    return call


def _options() -> list[Parameter]:
    return [
        _option(name, hint, note)
        for name, hint in OPTIONS.items()
        for note in getattr(hint, "__metadata__", ())
        if isinstance(note, Cli)
    ]


def _option(name: str, hint: Any, note: Cli) -> Parameter:
    kind = get_args(hint)[0]
    declaration = typer.Option(f"--{name.replace('_', '-')}", metavar=note.metavar, help=note.help)
    if kind not in (bool, int | None, float | None):  # texts, which may be repeated
        kind = list[str] | None
    default = False if kind is bool else None
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declaration])


def _parse_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not ID=BIAS, as in 42=-1.5") from error
