"""Adds one flag for each option of a group to a command, so that typer lists and parses them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

import typer

from tokengrove.options.export import Teacher
from tokengrove.options.option import Conditions, Option, flag_of

Command = Callable[..., None]


def with_flags(command: Command, flags: Sequence[inspect.Parameter]) -> Command:
    """Replace `**flags` with these parameters in the signature and annotations, which typer reads."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [*(each for each in own if each.kind is not each.VAR_KEYWORD), *flags]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def flag_parameter(
    option: Option,
    *,
    help: str | None = None,
    heading: str | None = None,
    negated: bool = False,
    bounded: bool = True,
    also: str = "",
    **more: Any,
) -> inspect.Parameter:
    """The parameter of an option's flag. A flag that is not given is None: then other configuration applies.

    `heading`: the group in `--help`; None: that of the option. `negated`: a switch also gets the flag `--no-NAME`.
    `bounded`: typer checks the bounds of integers. `also`: another flag with the same meaning, which `--help` shows
    first.
    """
    negated = negated and option.kind is bool
    kind = bool if negated else _parsed(option)
    if bounded and kind is int:
        bounds = {"min": option.about.get("least"), "max": option.about.get("most")}
        more |= {end: int(bound) for end, bound in bounds.items() if bound is not None}
    flag = typer.Option(
        *([also] if also else []),
        f"{option.flag}/{flag_of(f'no_{option.parameter}')}" if negated else option.flag,
        help=help or described(option),
        rich_help_panel=heading or option.about.get("panel"),
        show_default=False,
        **more,
    )
    return inspect.Parameter(
        option.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, flag]
    )


def described(option: Option) -> str:
    """The help of an option, with its choices and its default."""
    words, text = option.choices, option.help
    if not all(word in text for word in words):
        text = f"{text.removesuffix('.')} ({_listed(words)})."
    if form := _form(option):
        text += f" {form}."
    return text if option.kind is bool or not option.default_text else f"{text} Default: {option.default_text}."


def _form(option: Option) -> str:
    """The form of a flag's value, if its type does not show it."""
    if option.kind is Conditions:
        return "KEY=VALUE, KEY>=NUMBER or KEY<=NUMBER; repeatable"
    if get_origin(option.kind) is Mapping:
        return "NAME=VALUE; repeatable"
    if get_args(option.kind)[:1] == (Teacher,):
        return "NAME=MODEL or NAME=MODEL,top_k=8; repeatable"
    if option.repeats:
        return "Repeatable"
    if _is_word_bool(option):
        return "True or false"
    return f"In {option.about['unit']}" if "unit" in option.about else ""


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}"


def _is_word_bool(option: Option) -> bool:
    """Whether the flag of a boolean takes a value, because it is neither true nor false by default."""
    return option.kind is bool and option.default is None


def _parsed(option: Option) -> Any:
    """The type that typer reads."""
    if option.repeats:
        return list[int] if get_args(option.kind)[:1] == (int,) else list[str]
    if option.kind in (int, float):
        return option.kind
    is_switch = option.default is False or option.default is True
    return bool if is_switch else str
