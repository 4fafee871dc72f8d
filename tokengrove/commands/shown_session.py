"""Prints one session: its tree, one of its turns, or its samples, as text or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from tokengrove.commands.session_source import Layout, SessionSource
    from tokengrove.terminal.colouring import By


def print_tree(source: SessionSource, *, diff: bool, as_json: bool) -> None:
    """Print the tree, and with `diff` both sides of each fork."""
    answer = source.tree()
    if as_json:
        print_json(answer)
        return
    from tokengrove.client.values import tree_of
    from tokengrove.terminal.forks import print_fork, summary
    from tokengrove.tree_view import session_tree

    tree, console = tree_of(answer), console_of()
    turns = [node for node in tree.interactions if node.turn is not None]  # failed ones have no number, and no forks
    forks = {node.id: node.compared for node in turns if node.compared and node.compared["nearest"]}
    shown = session_tree(tree, lambda node: summary(forks[node.id]) if node.id in forks else ())
    console.print(shown, soft_wrap=False)  # it wraps its own lines, with indentation
    if not diff:
        return
    for node in turns:
        if node.id in forks:
            print_fork(source.turn, node, forks[node.id], console)


def print_turn(source: SessionSource, name: str, *, whole: bool, as_json: bool) -> None:
    """Print one turn, by its number or id; as JSON with its messages, times and comparison."""
    from tokengrove.terminal import turn_view

    answer = source.turn(name, "messages", "times", "compared")
    if as_json:
        print_json(answer)
        return
    turn_view.print_turn(source.turn, answer, console_of(), whole=whole)


def print_trained(source: SessionSource, *, as_json: bool) -> None:
    """Print what trainers told of each turn, one line for each step, or as JSON."""
    turns = source.annotations()
    if as_json:
        print_json({"turns": turns})
        return
    from tokengrove.terminal.trained_view import trained_table

    numbers = {node["id"]: node["turn"] for node in source.tree()["interactions"]}
    console_of().print(trained_table(turns, numbers))


def print_tokens(
    source: SessionSource,
    name: str,
    layout: Layout,
    by: By,
    routes: Sequence[str] = (),
    *,
    whole: bool,
    as_json: bool,
) -> None:
    """Print the tokens of one turn, coloured by training state, logprob or weight version, and its side columns.

    Without `whole`, only the columns of its first sampled tokens.
    """
    from tokengrove.terminal.column_view import column_view
    from tokengrove.terminal.token_view import token_view
    from tokengrove.terminal.turn_view import heading

    answer = source.tokens(name, layout, routes)
    columns = _columns(source, answer, whole=whole) if answer["notes"].get("replay") else None
    if as_json:
        print_json(answer if columns is None else {**answer, "columns": columns})
        return
    console = console_of()
    console.print(heading(answer))
    console.print(token_view(answer["tokens"], by, whole=whole))
    if columns is not None:
        console.print(column_view(columns, answer["tokens"], answer["output_tokens"]))


_ROWS, _PAGE = 32, 256


def _columns(source: SessionSource, turn: dict[str, Any], *, whole: bool) -> dict[str, Any]:
    """The side columns of the sampled tokens of a turn: all with `whole`, else of the first 32."""
    name, start, count = turn["interaction_id"], turn["prompt_tokens"], turn["output_tokens"]
    end = start + (count if whole else min(count, _ROWS))
    found = source.columns(name, start, min(_PAGE, max(end - start, 1)))
    for at in range(found["end"], end, _PAGE):
        page = source.columns(name, at, min(_PAGE, end - at))
        rows = {kind: [*found[kind], *page[kind]] for kind in _KINDS if found[kind] is not None}
        found = {**found, "end": page["end"], **rows}
    return found


_KINDS = ("kept", "experts", "alternatives")


def print_samples(source: SessionSource, layout: Layout, routes: Sequence[str] = (), *, as_json: bool) -> None:
    """Print the contents of each sample; as JSON, one line per sample, as in an export with `outline`."""
    from tokengrove.terminal.sample_view import sample_view

    outlined = source.samples(layout, routes)
    if as_json:
        for sample in outlined["samples"]:
            print_json(sample)
        return
    numbers = {node["interaction_id"]: node["turn"] for node in source.tree()["interactions"]}
    console_of().print(sample_view(outlined, numbers))


def console_of() -> Console:
    """A console without wrapping: terminals fold long lines, and pipes keep them whole."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value as one line of ASCII JSON, which is safe on any terminal and in any locale."""
    print(json.dumps(value))
