"""Agents as TRL's rollout function: one completion for each prompt, of what its session sampled, with its reward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support import real_server
from tokengrove.client import Client, Session
from tokengrove.client.adapters.trl_rollout import RolloutFunction, session_reward
from tokengrove.errors import InvalidRequest


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_server(tmp_path_factory.mktemp("rollouts")) as address:
        yield address


def ask(session: Session, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with its answer."""
    body = {"model": "m", "messages": messages}
    reply = httpx.post(session.base_url + "/chat/completions", json=body).raise_for_status().json()
    return [*messages, reply["choices"][0]["message"]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def agent(prompt: str, session: Session) -> None:
    """Two turns of one conversation, and one of another, which is a fork."""
    told = ask(session, [user(prompt)])
    ask(session, [*told, user("more")])
    session.set_reward(float(len(prompt)))
    ask(session, [user(f"apart from {prompt}")])


def test_a_prompt_becomes_the_completion_that_its_session_trains_most(url: str) -> None:
    prompts = ["say", "say", "sing"]
    fields = RolloutFunction(agent, url, at_once=2)(prompts, object())
    assert {len(rows) for rows in fields.values()} == {len(prompts)}
    with Client(url) as client:
        export = client.export(session_ids=fields["session_id"])
    assert len(export.samples) == 2 * len(prompts)
    longest = {sample.session_id: sample for sample in export.samples if len(sample.turns) == 2}
    for row, name in enumerate(fields["session_id"]):
        sample = longest[name]
        assert fields["prompt_ids"][row] + fields["completion_ids"][row] == sample.input_ids.tolist()
        start = len(fields["prompt_ids"][row])
        assert fields["env_mask"][row] == sample.loss_mask[start:].tolist()
        assert sum(fields["env_mask"][row]) == int(sample.loss_mask.sum()) and sample.loss_mask[start] == 1
        assert fields["logprobs"][row] == sample.logprobs[start:].tolist()
    groups = [longest[name].group_id for name in fields["session_id"]]
    assert groups[0] == groups[1] != groups[2]
    assert session_reward(prompts=prompts, completions=[], **fields) == [3.0, 3.0, 4.0]


def test_a_prompt_without_a_completion_is_an_error_that_names_its_session(url: str) -> None:
    with pytest.raises(InvalidRequest, match="no sampled token"):
        RolloutFunction(lambda prompt, session: None, url)(["say"], object())
    assert RolloutFunction(agent, url)([], object())["completion_ids"] == []


def test_an_exception_of_an_agent_ends_the_call(url: str) -> None:
    def broken(prompt: str, session: Session) -> None:
        raise ZeroDivisionError(prompt)

    with pytest.raises(ZeroDivisionError, match="sing"):
        RolloutFunction(broken, url)(["sing"], object())
