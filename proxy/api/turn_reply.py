"""The reply of a stored turn, rebuilt from its tokens and its request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from proxy.protocols.wire_protocol import WireProtocol
from proxy.sessions.attempts import reply_id
from proxy.trajectory.conversation import conversation_above, root
from proxy.trajectory.tree import Branch, build_tree, token_ids
from proxy.turns.replay import parse_again
from proxy.turns.reply_options import request_of
from proxy.turns.route import Routes
from proxy.types import Ids, Interaction
from tokengrove.reasons import Status


class Replies:
    """Writes replies in the form of each API. `protocols`: all protocols of turns."""

    def __init__(self, routes: Routes, protocols: Iterable[WireProtocol]) -> None:
        self._routes = routes
        self._protocols = {protocol.api: protocol for protocol in protocols}

    def reply(self, interactions: Sequence[Interaction], turn: Interaction) -> dict[str, Any] | None:
        """The whole body with all choices, even if it was streamed; None if the turn or another choice failed.

        `interactions`: all of the session, in order of `seq`.
        """
        name = reply_id(turn.id)
        return self._write(build_tree(interactions), [i for i in interactions if reply_id(i.id) == name])

    def replies(self, interactions: Sequence[Interaction]) -> list[dict[str, Any] | None]:
        """The reply of each turn of a session; see `reply`."""
        nodes, choices = build_tree(interactions), defaultdict(list)
        for interaction in interactions:
            choices[reply_id(interaction.id)].append(interaction)
        return [self._write(nodes, choices[reply_id(turn.id)]) for turn in interactions]

    def _write(self, nodes: Mapping[str, Branch], choices: Sequence[Interaction]) -> dict[str, Any] | None:
        """The reply with these choices."""
        if any(choice.status is not Status.COMPLETE for choice in choices):
            return None
        ordered = sorted(choices, key=lambda choice: (len(choice.id), choice.id))
        node = nodes[ordered[0].id]
        messages = (*conversation_above(node), *node.interaction.new_messages)
        request = request_of(node.interaction, messages, root(node).interaction.tools)
        route = self._routes.reader(node.interaction.route)
        renderer = None if route is None else route.renderer
        answers = [parse_again(renderer, request, choice, _prompt(nodes[choice.id]))[1] for choice in ordered]
        return self._protocols[node.interaction.api].reply(request, answers)


def _prompt(node: Branch) -> Ids:
    return token_ids(node)[: node.interaction.prompt_tokens]
