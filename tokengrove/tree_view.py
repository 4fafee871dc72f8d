"""The tree of a session for a terminal: one line per interaction, children below their parents."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.markup import escape
from rich.tree import Tree

from tokengrove.client import SessionTree, TreeNode
from tokengrove.reasons import Note
from tokengrove.texts import notes_text, printable


def session_tree(session: SessionTree, beneath: Callable[[TreeNode], Iterable[str]] = lambda _: ()) -> Tree:
    """The tree of a session. `beneath`: additional lines of a node, in rich's markup.

    The first child of a node is below it at the same depth, so that a long conversation remains a list. Other children
    are indented below their parent, and name it if it is not on the line before.
    """
    withdrawn = ", [yellow]withdrawn[/]" if session.extra.get("withdrawn") else ""
    about = f"{session.status}, {session.outcome or 'no outcome'}{withdrawn}"
    top = Tree(f"[bold]session {escape(session.session_id)}[/] {about}")
    known: dict[str, TreeNode] = {}
    beside: dict[str, Tree] = {}  # the place of a node's first child
    below: dict[str, Tree] = {}  # the place of its other children
    last: dict[int, TreeNode] = {}  # the last line at each place
    for node in session.interactions:
        parent = known.get(node.parent_id) if node.parent_id else None
        if parent is None:
            place = top
        else:
            place = below[parent.id] if node.turn is None else beside.pop(parent.id, below[parent.id])
        named = None if parent is None or last.get(id(place), parent) is parent else parent
        branch = place.add("\n".join((_line(node, named), *beneath(node))))
        if node.turn is not None:
            known[node.id], last[id(place)] = node, node
            beside[node.id], below[node.id] = branch if parent is None else place, branch
    return top


def _line(node: TreeNode, parent: TreeNode | None) -> str:
    """The line of a node. `parent`: the turn to name, because the line is not directly below it."""
    origin = "" if parent is None else f" from {parent.turn}"
    tokens = f"{node.prompt_tokens}+{node.output_tokens} tokens"
    if node.turn is None:
        why = printable(node.error or "no error was recorded")
        return f"[red]{node.status}[/]{origin}, {tokens}: {escape(why)}{_notes(node)}"
    aligned = "" if node.parent_id is None else ", aligned" if node.aligned else ", [red]not aligned[/]"
    reward = "" if node.reward is None else f", reward {node.reward:g}"
    value = "" if node.return_ is None else f", return {node.return_:.3g}"
    route = "" if node.route is None else f", [cyan]{escape(printable(node.route))}[/]"
    purpose = "" if node.purpose in (None, "main") else f", {escape(printable(node.purpose))}"
    head = f"{node.turn} [bold]{node.reason}[/]{origin}{route}{purpose}{aligned}"
    return f"{head}, {tokens}, {node.finish_reason}{reward}{value}{_notes(node)}"


def _notes(node: TreeNode) -> str:
    notes = {name: value for name, value in node.notes.items() if name != Note.SAMPLED_BY}
    return f" [yellow]({escape(notes_text(notes))})[/]" if notes else ""
