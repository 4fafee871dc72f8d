"""The tokens of a turn for a terminal: sampled tokens in colours, with a mark in words at every change of meaning.

Prompts are dim and shortened. Without colours, the marks have the same information: ⟦3 drift⟧, ⟦v2⟧, and the logprobs
of unlikely tokens after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from tokengrove.terminal.colouring import By
from tokengrove.texts import printable

Tokens = Mapping[str, Any]
"""The part `tokens` of a turn, requested with `include=tokens`."""

_SHOWN = 160
"""Characters shown of either end of a prompt."""
_UNLIKELY = -3.0
"""Logprobs below this are printed after their tokens."""
_LIKELY = ((-0.1, "green"), (-0.7, "bright_green"), (-1.6, "yellow"), (_UNLIKELY, "bright_red"))
_VERSIONS = ("cyan", "magenta", "yellow", "blue", "green", "red")


def token_view(tokens: Tokens, by: By, *, whole: bool = False) -> Group:
    """The tokens, then the meaning of the colours. `whole`: prompts in full."""
    text = Text()
    marks = {"mask": _states, "logprob": _logprobs, "version": _versions}[by](tokens)
    for part in tokens["parts"]:
        if part["kind"] == "prompt":
            text.append(_prompt(tokens, part["start"], part["end"], whole), "dim")
        else:
            _append(text, tokens, part["start"], part["end"], marks)
    legend = {"mask": _state_legend, "logprob": _logprob_legend, "version": _version_legend}[by](tokens)
    return Group(text, Text(), *legend, *_sections(tokens))


Mark = Callable[[int], tuple[str, str, str]]
"""The style of a token, the mark before it if the previous token has another mark, and the text after it."""


def _append(text: Text, tokens: Tokens, start: int, end: int, mark: Mark) -> None:
    """Append sampled tokens. Adjacent tokens with the same style become one span."""
    last, style, run = "", "", ""
    for at in range(start, end):
        new, before, behind = mark(at)
        if new != style or (before and before != last):
            text.append(run, style)
            style, run = new, ""
        if before != last:
            text.append(before, "bold reverse" if before else "")
            last = before
        run += _spelled(tokens, at) + behind
    text.append(run, style)


def _spelled(tokens: Tokens, at: int) -> str:
    """The text of a token; without a tokenizer, its id."""
    piece = tokens["texts"][at]
    return f"{tokens['ids'][at]} " if piece is None else printable(piece)


def _prompt(tokens: Tokens, start: int, end: int, whole: bool) -> str:
    if whole or end - start < 2 * _SHOWN:
        shown = "".join(_spelled(tokens, at) for at in range(start, end))
        if whole or len(shown) <= 3 * _SHOWN:
            return shown
    first = "".join(_spelled(tokens, at) for at in range(start, min(end, start + _SHOWN)))[:_SHOWN]
    last = "".join(_spelled(tokens, at) for at in range(max(start, end - _SHOWN), end))[-_SHOWN:]
    return f"{first} ⟦… {end - start} tokens of prompt …⟧ {last}"


def _states(tokens: Tokens) -> Mark:
    """Marks with the training state, before the first token of each run."""
    runs = _by_token(tokens["states"], len(tokens["ids"]))

    def mark(at: int) -> tuple[str, str, str]:
        run = runs[at]
        if run is None:
            return "", "", ""
        style = "green" if run["state"] == "trained" else "yellow underline"
        return style, f"⟦{run['end'] - run['start']} {run['state']}⟧", ""

    return mark


def _logprobs(tokens: Tokens) -> Mark:
    def mark(at: int) -> tuple[str, str, str]:
        value = tokens["logprobs"][at]
        if value is None:
            return "underline", "⟦no logprob⟧", ""
        colour = next((name for least, name in _LIKELY if value >= least), "bold red")
        return colour, "", f"({value:.1f})" if value < _UNLIKELY else ""

    return mark


def _versions(tokens: Tokens) -> Mark:
    runs = _by_token(tokens["versions"], len(tokens["ids"]))

    def mark(at: int) -> tuple[str, str, str]:
        run = runs[at]
        if run is None:
            return "underline", "⟦no version⟧", ""
        return _VERSIONS[run["version"] % len(_VERSIONS)], f"⟦v{run['version']}⟧", ""

    return mark


def _by_token(runs: Sequence[Mapping[str, Any]], length: int) -> list[Mapping[str, Any] | None]:
    found: list[Mapping[str, Any] | None] = [None] * length
    for run in runs:
        found[run["start"] : run["end"]] = [run] * (run["end"] - run["start"])
    return found


def _state_legend(tokens: Tokens) -> Iterator[Text]:
    """The states of this path with their meanings, then the counts of the whole session."""
    counts: dict[str, int] = {}
    for run in tokens["states"]:
        counts[run["state"]] = counts.get(run["state"], 0) + run["end"] - run["start"]
    for state, count in counts.items():
        style = {"trained": "green", "context": "dim", "image": "dim"}.get(state, "yellow underline")
        yield Text.assemble((state, style), f" {count}: it {printable(tokens['meanings'].get(state, ''))}")
    export = tokens["export"]
    trained = f"{export['trained_tokens']} of {export['sampled_tokens']} sampled tokens of the session are trained"
    yield Text(f"layout {export['layout']}, {export['samples']} samples: {trained}", "dim")


def _logprob_legend(tokens: Tokens) -> Iterator[Text]:
    known = [value for value in tokens["logprobs"] if value is not None]
    if not known:
        yield Text("no token has a logprob", "dim")
        return
    steps = [(f"from {least:g} ", name) for least, name in _LIKELY]
    yield Text.assemble("logprob ", *steps, ("below that", "bold red"))
    yield Text(f"{len(known)} tokens, mean {sum(known) / len(known):.3f}, lowest {min(known):.3f}", "dim")


def _version_legend(tokens: Tokens) -> Iterator[Text]:
    counts: dict[int, int] = {}
    for run in tokens["versions"]:
        counts[run["version"]] = counts.get(run["version"], 0) + run["end"] - run["start"]
    for version, count in sorted(counts.items()):
        yield Text.assemble((f"version {version}", _VERSIONS[version % len(_VERSIONS)]), f": {count} tokens")


def _sections(tokens: Tokens) -> Iterator[Text]:
    """The places where the path was cut, and the turns that lose their tokens there."""
    for section in tokens["sections"][:-1]:
        turns = ", ".join(str(turn["turn"]) for turn in section["turns"])
        yield Text(f"cut: the prompt does not begin with the {section['tokens']} tokens of turns {turns}", "yellow")
    if lost := ", ".join(str(turn["turn"]) for turn in tokens["lost"]):
        yield Text(f"not shown: the outputs of turns {lost}", "yellow")
