"""The trace of a session for OpenEnv is what the session stores, turn by turn."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.support import function_tool, real_server, user
from tokengrove.client import Client, Session
from tokengrove.client.adapters.openenv import trace_entries, training_trace
from tokengrove.errors import InvalidRequest, SessionNotFound


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with real_server(tmp_path_factory.mktemp("trace")) as url, Client(url) as client:
        yield client


def turn(client: Client, session: Session, messages: list[Any], **more: Any) -> dict[str, Any]:
    """One turn with all its parts, as the server stores it; its answer is appended to `messages`."""
    with client.http_client() as http:
        body = {"model": "m", "max_tokens": 5, "messages": messages, **more}
        reply = http.post(f"{session.base_url}/chat/completions", json=body).raise_for_status().json()
    messages.append(reply["choices"][0]["message"])
    return client.show_turn(session.session_id, reply["id"], ["ids", "logprobs", "messages"])


def test_every_turn_has_the_ids_and_logprobs_that_are_stored(client: Client) -> None:
    with client.session("trace") as session:
        messages = [user("Hello")]
        first = turn(client, session, messages, temperature=0.5, tools=[function_tool("look")])
        live = trace_entries(client, session.session_id)
        second = turn(client, session, [*messages, user("More")], tools=[function_tool("look")])
        other = turn(client, session, [user("Something else")])
    entries = trace_entries(client, session.session_id)
    assert live == entries[:1]
    for number, (entry, stored) in enumerate(zip(entries, (first, second, other), strict=True)):
        assert entry["prompt_token_ids"] == stored["prompt_ids"]
        assert entry["completion_token_ids"] == stored["output_ids"]
        assert entry["per_token_logps"] == stored["logprobs"] and len(stored["logprobs"]) == 5
        assert entry["loss_mask"] == [0] * len(stored["prompt_ids"]) + [1] * 5
        assert entry["request"]["messages"] == stored["messages"]
        assert entry["response"]["choices"] == [{"message": stored["output"], "finish_reason": "length"}]
        assert (entry["metadata"]["node_id"], entry["metadata"]["index"]) == (stored["id"], number)
    assert [bool(entry["request"]["tools"]) for entry in entries] == [True, True, False]
    assert entries[0]["metadata"]["sampling_params"]["temperature"] == 0.5
    assert entries[1]["metadata"]["parent_id"] == first["id"]


def test_a_turn_that_is_not_trained_is_context_with_its_logprobs(client: Client) -> None:
    with client.session("masked") as session:
        messages = [user("Hello")]
        marked = turn(client, session, messages)
        session.mark(interaction_id=marked["id"], trainable=False)
        partly = turn(client, session, [*messages, user("More")])
        session.mark(interaction_id=partly["id"], trainable=True, spans=[(1, 3)])
        forced = turn(client, session, [user("JSON")], response_format={"type": "json_object"})
    entries = trace_entries(client, session.session_id)
    completions = [entry["loss_mask"][len(entry["prompt_token_ids"]) :] for entry in entries]
    assert completions == [[0] * 5, [0, 1, 1, 0, 0], [0] * 5]
    assert not any(any(entry["loss_mask"][: len(entry["prompt_token_ids"])]) for entry in entries)
    assert [entry["per_token_logps"] for entry in entries] == [
        stored["logprobs"] for stored in (marked, partly, forced)
    ]


def test_train_chooses_the_turns_as_in_an_export(client: Client) -> None:
    with client.session("last") as session:
        messages = [user("Hello")]
        turn(client, session, messages)
        turn(client, session, [*messages, user("More")])
    entries = trace_entries(client, session.session_id, train={"turns": "last"})
    assert [any(entry["loss_mask"]) for entry in entries] == [False, True]


def test_a_session_without_turns_has_an_empty_trace_and_an_unknown_one_none(client: Client) -> None:
    with client.session("empty") as session:
        assert trace_entries(client, session.session_id) == []
    with pytest.raises(SessionNotFound):
        trace_entries(client, "no-such-session")


@pytest.mark.skipif(find_spec("openenv") is not None, reason="openenv is installed")
def test_the_error_without_openenv_says_how_to_get_it(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="pip install openenv"):
        training_trace(client, "any")
