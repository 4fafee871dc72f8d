"""Interactions made by hand, for tests of code that reads stored interactions."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hypothesis import strategies as st

from proxy.types import Api, Interaction, Message, Role, SamplingParams, ids_of
from tokengrove.options.model import RouteKind
from tokengrove.reasons import FinishReason, Reason, Status


def interaction(
    name: str,
    *,
    parent: str | None = None,
    suffix: Sequence[int] = (1,),
    output: Sequence[int] = (2,),
    prefix: int = 0,
    version: int = 0,
    reward: float | None = None,
    seq: int = 0,
) -> Interaction:
    """Make a complete interaction; it is aligned if `prefix` (tokens of the parent's prompt and output) is given."""
    return Interaction(
        id=name,
        session_id="s",
        parent_id=parent,
        aligned=prefix > 0,
        reason=Reason.CONTINUED if parent else Reason.FIRST,
        api=Api.CHAT,
        status=Status.COMPLETE,
        new_messages=(Message(Role.USER, f"to {name}"),),
        output=Message(Role.ASSISTANT, f"from {name}"),
        prefix_length=prefix,
        prompt_suffix=ids_of(suffix),
        output_ids=ids_of(output),
        logprobs=array("f", [-0.5] * len(output)),
        versions=((len(output), version),) if output else (),
        finish_reason=FinishReason.STOP,
        sampling=SamplingParams(),
        reward=reward,
        seq=seq,
    )


@st.composite
def forests(draw: st.DrawFn) -> list[Interaction]:
    """Trees of up to ten nodes, some not aligned, some marked. All their tokens differ."""
    nodes: list[Interaction] = []
    for at in range(draw(st.integers(1, 10))):
        parent = draw(st.sampled_from([None, *nodes]))
        prefix = parent.prompt_tokens + len(parent.output_ids) if parent and draw(st.booleans()) else 0
        counts = [draw(st.integers(1, 3)) for _ in range(2)]
        suffix, output = (
            range(first, first + count) for first, count in zip((20 * at, 20 * at + 10), counts, strict=True)
        )
        name = parent.id if parent else None
        made = interaction(str(at), parent=name, prefix=prefix, suffix=suffix, output=output, seq=at)
        made.trainable = draw(st.booleans())
        made.spans = ((0, 1),) if draw(st.booleans()) else ()
        nodes.append(made)
    return nodes


ROUTES = {
    "policy": RouteKind.POLICY,
    "rival": RouteKind.POLICY,
    "opponent": RouteKind.FROZEN,
    "judge": RouteKind.EXTERNAL,
}
"""The routes of `routed_forests`."""


@st.composite
def routed_forests(draw: st.DrawFn) -> list[Interaction]:
    """Trees of up to ten nodes of several routes; no node continues one of another route. Some have rewards."""
    nodes = draw(forests())
    by_id: dict[str, Interaction] = {}
    for node in nodes:
        above = by_id.get(node.parent_id or "")
        routed(node, draw(st.sampled_from(sorted(ROUTES))) if above is None else above.route)
        node.reward = draw(st.sampled_from([None, None, 1.0, -0.5]))
        by_id[node.id] = node
    return nodes


def routed(node: Interaction, route: str) -> Interaction:
    """Give a node a route of ROUTES. One of kind external loses its tokens."""
    node.route, node.route_kind = route, ROUTES[route]
    if node.route_kind is RouteKind.EXTERNAL:
        node.prompt_suffix, node.output_ids, node.logprobs = ids_of(), ids_of(), array("f")
        node.versions, node.prefix_length, node.aligned = (), 0, False
        node.has_logprobs, node.trainable, node.spans = False, False, ()
    return node
