"""Routes in the client: the group of a sample, and the fields that name a route."""

from __future__ import annotations

from tests.samples import chain
from tokengrove.client import operations
from tokengrove.client.adapters.parts import group_of
from tokengrove.client.values import tree_of


def test_samples_of_two_routes_are_in_groups_of_their_own() -> None:
    of_routes = [chain([((1,), (2,))], rewards=[0.0], group="g", route=route) for route in ("policy", "rival")]
    assert [each.route for each in of_routes] == ["policy", "rival"]
    assert list(map(group_of, of_routes)) == ["g@policy", "g@rival"]
    without = chain([((1,), (2,))], rewards=[0.0], group="g")
    assert (without.route, group_of(without)) == (None, "g")


def test_claims_and_acknowledgements_name_a_route() -> None:
    claim = next(operations.claim(None, {"route": "rival", "limit": 2}))
    assert claim.body == {"route": "rival", "limit": 2}
    acknowledged = next(operations.acknowledge(None, ["s"], "rival"))
    assert acknowledged.body == {"session_ids": ["s"], "route": "rival"}


def test_steps_are_the_complete_turns_of_trained_routes() -> None:
    node = {
        **{"id": "a", "parent_id": None, "aligned": False, "seq": 0, "api": "chat", "reason": "first"},
        **{"status": "complete", "purpose": "main", "reward": None, "return": None, "finish_reason": "stop"},
        **{"prompt_tokens": 1, "output_tokens": 1, "versions": []},
    }
    kinds = [{"turn": 0}, {"turn": 1, "route": "policy", "route_kind": "policy"}, {"turn": None}]
    kinds += [
        {"turn": 2, "route": "opponent", "route_kind": "frozen"},
        {"turn": 3, "route": "j", "route_kind": "external"},
    ]
    session = {"session_id": "s", "status": "ended", "task_id": None, "group_id": None, "outcome": None}
    tree = tree_of({**session, "interactions": [{**node, **kind} for kind in kinds]})
    assert [each.is_step for each in tree.interactions] == [True, True, False, False, False]
