"""Turns of several routes in one session: whose tokens are trained, once, and whose rewards count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.advantages import Groups, group_of
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.trajectory.returns import compute_returns
from proxy.trajectory.routes import by_route, trained_turns
from proxy.trajectory.sample_row import SampleRow
from proxy.trajectory.scored_session import scored_session
from proxy.trajectory.selection import marked
from proxy.trajectory.session_samples import SessionSamples
from proxy.trajectory.summary import certificate, summarise
from proxy.types import Interaction, Message, Outline, Role, SessionRecord, Tool
from tests.interactions import ROUTES, forests, interaction, routed, routed_forests
from tokengrove.options.export import Baseline, Layout, Padding, TooLong
from tokengrove.options.model import RouteKind
from tokengrove.options.session import Credit
from tokengrove.reasons import Reason, Untrained

LAYOUTS = (Layout.INDIVIDUAL, Layout.CONCAT, Layout.TREE, Layout.PADDED)
CHOICES = (None, *map(frozenset, (["policy"], ["rival"], ["opponent"], ["policy", "rival"], ["policy", "opponent"])))
PADDING = Padding(prompt_length=64, response_length=64, pad_token_id=999, on_too_long=TooLong.DROP)
RECORD = SessionRecord("s")


def options_of(layout: Layout, routes: frozenset[str] | None = None) -> LayoutOptions:
    return LayoutOptions(layout=layout, routes=routes, padding=PADDING if layout is Layout.PADDED else None)


def trained_tokens(rows: Iterable[SampleRow]) -> Counter[int]:
    found: Counter[int] = Counter()
    for row in rows:
        columns = row.columns()
        found.update(columns["input_ids"][columns["loss_mask"] == 1].tolist())
    return found


def allowed(nodes: Sequence[Interaction]) -> Counter[int]:
    """The sampled tokens that the marks of these turns allow to train."""
    return Counter(token for node in nodes for token in np.asarray(node.output_ids)[marked(node)].tolist())


def described(row: SampleRow) -> tuple[object, dict[str, list[object]]]:
    return row.labels(), {name: values.tolist() for name, values in row.columns().items()}


@given(routed_forests(), st.sampled_from(CHOICES))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exactly_the_tokens_of_the_chosen_trained_routes_are_trained_once(
    layout: Layout, nodes: list[Interaction], routes: frozenset[str] | None
) -> None:
    chosen = [node for node in trained_turns(nodes) if routes is None or node.route in routes]
    assert trained_tokens(lay_out(RECORD, nodes, options_of(layout, routes)).rows) == allowed(chosen)


@given(routed_forests(), st.sampled_from(CHOICES))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sampled_token_is_trained_or_has_a_reason(
    layout: Layout, nodes: list[Interaction], routes: frozenset[str] | None
) -> None:
    options = options_of(layout, routes)
    counts = lay_out(RECORD, nodes, options).counts(options)
    assert counts["sampled_tokens"] == sum(len(node.output_ids) for node in nodes)
    assert counts["sampled_tokens"] == counts["trained_tokens"] + sum(counts["untrained_tokens"].values())
    left = Counter[str]()
    for node in nodes:
        if node.route_kind is RouteKind.FROZEN:
            left[Untrained.FROZEN] += len(node.output_ids)
        elif routes is not None and node.route not in routes:
            left[Untrained.ROUTE] += len(node.output_ids)
    told = {name: counts["untrained_tokens"].get(name, 0) for name in (Untrained.FROZEN, Untrained.ROUTE)}
    assert told == {name: left[name] for name in told}


@given(routed_forests(), st.sampled_from(CHOICES))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sample_has_turns_of_the_route_that_it_names(
    layout: Layout, nodes: list[Interaction], routes: frozenset[str] | None
) -> None:
    for row in lay_out(RECORD, nodes, options_of(layout, routes)).rows:
        [named] = {placed.interaction.route for placed in row.placements}
        assert row.labels()["route"] == named
        assert ROUTES[named] is RouteKind.POLICY if routes is None else named in routes
        if ROUTES[named] is not RouteKind.POLICY:
            assert not row.is_trained


@given(routed_forests())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_samples_of_a_route_are_those_of_a_session_with_its_turns_alone(
    layout: Layout, nodes: list[Interaction]
) -> None:
    options = replace(options_of(layout), advantages=Baseline.GRPO)
    found: list[object] = []
    for route, turns in by_route(nodes).items():
        alone = lay_out(RECORD, turns, replace(options, routes=frozenset({route})), groups_of(turns, options)).rows
        named = lay_out(RECORD, nodes, replace(options, routes=frozenset({route})), groups_of(nodes, options)).rows
        assert [described(row) for row in named] == [described(row) for row in alone]
        if ROUTES[route] is RouteKind.POLICY:
            found += map(described, named)
    assert [described(row) for row in lay_out(RECORD, nodes, options, groups_of(nodes, options)).rows] == found


def groups_of(nodes: Sequence[Interaction], options: LayoutOptions, groups: Groups | None = None) -> Groups:
    groups = groups or Groups()
    for route, turns in by_route(nodes).items():
        scored = scored_session(RECORD, turns, options)
        groups.add(group_of("s", None, route), scored.values(), scored.steps())
    return groups


@given(routed_forests())
@pytest.mark.parametrize("credit", Credit)
def test_returns_of_a_route_come_from_its_own_rewards(credit: Credit, nodes: list[Interaction]) -> None:
    alone = {
        name: value for turns in by_route(nodes).values() for name, value in compute_returns(turns, 0.9, credit).items()
    }
    assert compute_returns(nodes, 0.9, credit) == alone


@given(forests())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_table_nothing_names_a_route(layout: Layout, nodes: list[Interaction]) -> None:
    laid = lay_out(RECORD, nodes, options_of(layout))
    assert all("route" not in row.labels() for row in laid.rows)
    assert "by_route" not in laid.entry and "routes" not in certificate(RECORD, nodes)
    for node in nodes:
        routed(node, "policy")
    again = lay_out(RECORD, nodes, options_of(layout))
    assert [described(row)[1] for row in again.rows] == [described(row)[1] for row in laid.rows]


def an_episode(*rewards: tuple[str, float | None]) -> list[Interaction]:
    """One turn after the other, each of a route, with a reward."""
    return [
        routed(interaction(str(at), suffix=(at,), output=(20 + at,), seq=at, reward=reward), route)
        for at, (route, reward) in enumerate(rewards)
    ]


def laid(nodes: Sequence[Interaction], **options: object) -> SessionSamples:
    return lay_out(RECORD, nodes, LayoutOptions(**options))  # type: ignore[arg-type]


def test_a_score_sums_the_rewards_of_its_own_route() -> None:
    nodes = an_episode(("policy", 1.0), ("opponent", 7.0), ("rival", -1.0), ("judge", 5.0))
    assert {row.labels()["route"]: row.labels()["score"] for row in laid(nodes).rows} == {"policy": 1.0, "rival": -1.0}
    entry = laid(nodes).entry
    assert entry["score"] == 1.0
    assert {name: each["score"] for name, each in entry["by_route"].items()} == {"policy": 1.0, "rival": -1.0}
    assert "by_route" not in laid(nodes, routes=frozenset({"rival"})).entry
    assert laid(nodes, routes=frozenset({"rival"})).entry["score"] == -1.0


def test_a_session_of_frozen_and_external_turns_has_no_sample_and_no_score() -> None:
    found = laid(an_episode(("opponent", 7.0), ("judge", 5.0)))
    assert len(found.rows) == 0
    assert found.entry["score"] is None
    assert found.ledger.untrained() == {"frozen": 1}


def test_a_score_of_the_whole_session_is_that_of_each_route() -> None:
    nodes = an_episode(("policy", None), ("rival", None))
    rows = lay_out(replace(RECORD, score=0.5), nodes, LayoutOptions()).rows
    assert [row.labels()["score"] for row in rows] == [0.5, 0.5]


def test_two_policies_are_compared_in_groups_of_their_own() -> None:
    options = LayoutOptions(advantages=Baseline.LEAVE_ONE_OUT)
    one, other = (an_episode(("policy", 1.0), ("rival", 0.0)), an_episode(("policy", 0.0), ("rival", 4.0)))
    groups = groups_of(other, options, groups_of(one, options))
    rows = lay_out(RECORD, one, options, groups).rows
    assert {row.labels()["route"]: row.columns()["advantages"].tolist() for row in rows} == {
        "policy": [1.0],
        "rival": [-4.0],
    }
    assert [row.columns()["weight"].tolist() for row in rows] == [[1.0], [1.0]], "each counts once in its own batch"


def test_turns_that_are_never_trained_are_not_compared() -> None:
    options = LayoutOptions(routes=frozenset({"opponent"}), advantages=Baseline.GRPO)
    (node,) = nodes = an_episode(("opponent", 7.0))
    node.state_hash = "asked"
    scored = scored_session(RECORD, nodes, options)
    assert (scored.values(), list(scored.steps())) == ([], [])
    [row] = lay_out(RECORD, nodes, options).rows
    assert (row.is_trained, row.labels()["score"]) == (False, 7.0)


def test_an_opponent_with_tools_does_not_make_the_policy_a_sub_agent() -> None:
    nodes = an_episode(("opponent", None), ("policy", None))
    nodes[0].tools = (Tool("move", "", {}),)
    nodes[1].tools = (Tool("look", "", {}),)
    nodes[1].new_messages = (Message(Role.SYSTEM, "You are someone else."), Message(Role.USER, "go"))
    scored = scored_session(RECORD, nodes, LayoutOptions())
    assert scored.purposes == {"0": "main", "1": "main"}


def test_equal_prompts_to_two_routes_are_no_alternatives() -> None:
    nodes = an_episode(("policy", 1.0), ("rival", 2.0))
    for node in nodes:
        node.state_hash, node.created_at, node.completed_at, node.reason = "same", 1.0, 3.0, Reason.RESAMPLED
    found = summarise(RECORD, Outline(nodes, 0, 0, None))
    assert found.score == 3.0, "the rewards of all trained routes"


def test_a_summary_has_the_score_and_returns_of_trained_routes_only() -> None:
    nodes = an_episode(("policy", 1.0), ("opponent", 7.0), ("judge", 5.0))
    found = summarise(RECORD, Outline(nodes, 0, 0, None))
    assert (found.score, found.returns.tolist(), found.turns) == (1.0, [1.0], 3)
    assert found.routes == {
        "policy": {"kind": "policy", "turns": 1},
        "opponent": {"kind": "frozen", "turns": 1},
        "judge": {"kind": "external", "turns": 1},
    }


@given(routed_forests(), st.sampled_from(sorted(ROUTES)))
def test_rows_of_layout_individual_are_made_when_they_are_read(nodes: list[Interaction], route: str) -> None:
    rows = laid(nodes, layout=Layout.INDIVIDUAL, routes=frozenset({route})).rows
    assert [row.labels()["interaction_id"] for row in rows] == [
        node.id for node in nodes if node.route == route and node.route_kind is not RouteKind.EXTERNAL
    ]
    assert [row.labels()["interaction_id"] for row in rows[1:]] == [row.labels()["interaction_id"] for row in rows][1:]
