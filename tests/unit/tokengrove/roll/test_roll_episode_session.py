"""An episode of ROLL's managers as a session: what it is started with, and how every path ends it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support import real_server, user
from tokengrove.client import Client, ServerUnreachable
from tokengrove.errors import InvalidRequest
from tokengrove.roll import EpisodeResult, Section
from tokengrove.roll.managers import EpisodeSession
from tokengrove.roll.managers.episode_session import zipped

KEY = "a-key-of-the-administrator"
ENV = Section(tag="Sums", group_id=3, env_id=7, max_tokens_per_step=3, config={})
WORKER = Section(generating_args={"max_new_tokens": 5, "temperature": 0.5, "top_k": 100, "num_beams": 1})
PIPELINE = Section(exp_name="exp", sequence_length=256, step_reward_gamma=0.5)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Of a server with an admin key, on which a start needs a grant."""
    folder = tmp_path_factory.mktemp("keyed")
    settings: dict[str, Any] = {"engine_arg": ("tokens=9",), "admin_key": KEY, "capacity_control": True}
    with real_server(folder, **settings) as url, Client(url, KEY) as client:
        yield client


def start(
    client: Client, env: Any = ENV, worker: Any = WORKER, pipeline: Any = PIPELINE, **more: Any
) -> EpisodeSession:
    given = {"mode": "train", "episode_id": 2, "seed": 44, "group_seed": 42, "step": 5, **more}
    return EpisodeSession.start(client, env_config=env, worker_config=worker, pipeline_config=pipeline, **given)


def turn(session: EpisodeSession, text: str = "Hello", **fields: Any) -> dict[str, Any]:
    """One call of the model, with the key of the agent."""
    answer = httpx.post(
        f"{session.session.base_url}/chat/completions",
        json={"messages": [user(text)], **fields},
        headers={"Authorization": f"Bearer {session.api_key}"},
    )
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def played(client: Client, turns: int, **more: Any) -> EpisodeSession:
    session = start(client, **more)
    for number in range(turns):
        turn(session, f"Number {number}")
    return session


def shown(session: EpisodeSession) -> Any:
    return session.client.session_tree(session.session.session_id)


def rewards(session: EpisodeSession) -> list[float | None]:
    return [node.reward for node in shown(session).interactions]


def test_a_session_says_whose_episode_it_is_and_samples_as_the_configuration_says(client: Client) -> None:
    session = start(client)
    turn(session)
    session.finish(EpisodeResult("Finished", 1.0))
    tree, export = shown(session), session.exported("concat")
    assert (tree.task_id, tree.group_id, tree.extra["discount"]) == ("Sums", "Sums_3_2_42", 0.5)
    traj_id = tree.extra["metadata"].pop("traj_id")
    assert traj_id.startswith("Sums_3_2_42_7_") and tree.extra["metadata"] == {
        **{"env_id": 7, "group_id": 3, "tag": "Sums", "mode": "train", "exp_name": "exp", "episode_id": 2},
        **{"seed": 44, "step": 5, "validate": False},
    }
    (sample,) = export.samples
    assert sample.sampling == {"temperature": 0.5, "top_k": 100, "max_tokens": 3}
    assert int(sample.loss_mask.sum()) == 3  # of the nine that the model would sample


def test_a_prompt_that_fills_the_sequence_is_refused_and_an_answer_never_exceeds_it(client: Client) -> None:
    session = start(client, pipeline=Section({**PIPELINE, "sequence_length": 15}))
    turn(session, "")
    full = httpx.post(
        f"{session.session.base_url}/chat/completions",
        json={"messages": [user("a longer text, which does not fit")]},
        headers={"Authorization": f"Bearer {session.api_key}"},
    )
    assert (full.status_code, full.json()["error"]["code"]) == (400, "context_length_exceeded")
    session.finish(EpisodeResult("Finished", 0.0))
    assert [len(sample.input_ids) <= 15 for sample in session.exported("concat").samples] == [True]


def test_an_answer_has_no_more_tokens_than_a_step_whatever_the_agent_asks_for(client: Client) -> None:
    session = start(client)
    assert turn(session, max_tokens=8)["usage"]["completion_tokens"] == ENV.max_tokens_per_step
    session.fail("done")


def test_each_step_score_is_the_reward_of_its_turn(client: Client) -> None:
    session = played(client, 3)
    session.finish(EpisodeResult("Finished", 0.75, [0.5, 0.0, 0.25], "done", {"steps": 3}))
    tree = shown(session)
    assert tree.extra["metrics"].pop("traj_time_total") > 0
    assert rewards(session) == [0.5, 0.0, 0.25]
    assert (tree.outcome, tree.extra["exit_reason"], tree.extra["metrics"]) == (
        *("Finished", "done"),
        {"steps": 3, "score": 0.75},
    )


@pytest.mark.parametrize(
    ("scores", "expected"),
    [([], [None, 2.0]), ([0.5], [0.5, None]), ([0.5, 0.25, 1.0], [0.5, 1.25])],
)
def test_scores_that_are_no_score_for_each_turn_lose_nothing(
    client: Client, scores: list[float], expected: list[float | None]
) -> None:
    session = played(client, 2)
    session.finish(EpisodeResult("Failed", 2.0, scores))
    assert rewards(session) == expected
    assert shown(session).outcome == "Failed"


def test_scores_are_zipped_to_turns_and_the_rest_is_added_to_the_last() -> None:
    assert zipped([1.0, 2.0], 3) == [1.0, 2.0]
    assert zipped([1.0, 2.0, 4.0], 1) == [7.0]


def test_an_episode_without_a_turn_ends_without_a_reward(client: Client) -> None:
    session = start(client)
    session.finish(EpisodeResult("NoData", 0.0))
    assert (shown(session).outcome, session.exported("concat").samples) == ("NoData", [])


def test_a_status_of_its_own_is_a_failure_with_the_reason(client: Client) -> None:
    session = start(client)
    session.finish(EpisodeResult("RunnerError", 0.0, agent_exit_reason="no sandbox"))
    tree = shown(session)
    assert (tree.outcome, tree.extra["exit_reason"]) == (
        "Failed",
        "run_job returned the status 'RunnerError', which is none of Finished, Failed, NoData, Timeout; its "
        "agent_exit_reason: no sandbox",
    )


def test_a_late_episode_is_unfinished(client: Client) -> None:
    session = start(client)
    session.fail("the agent took longer than 3 s", "Timeout")
    session.fail("a second time")
    tree = shown(session)
    assert (tree.outcome, tree.extra["exit_reason"]) == ("Timeout", "the agent took longer than 3 s")
    session = start(client)
    session.finish(EpisodeResult("Timeout", 0.0))
    assert shown(session).extra["finished"] is False


@pytest.mark.parametrize(
    ("score", "rewards_by_id", "told"),
    [(float("nan"), None, "Out of range float"), (1.0, {"chatcmpl-of-nobody": 1.0}, "chatcmpl-of-nobody")],
)
def test_a_reward_that_the_server_refuses_fails_the_episode_and_ends_it(
    client: Client, score: float, rewards_by_id: dict[str, float] | None, told: str
) -> None:
    session = played(client, 1)
    session.finish(EpisodeResult("Finished", score), rewards_by_id)
    tree = shown(session)
    assert (tree.status, tree.outcome, session.outcome, rewards(session)) == ("ended", "Failed", "Failed", [None])
    assert told in tree.extra["exit_reason"]


def test_any_metric_and_any_reason_can_be_stored(client: Client) -> None:
    deep: Any = []
    for _ in range(2000):
        deep = [deep]
    session = played(client, 1)
    about = {"rate": np.float32(0.5), "object": object, "text": "a\0b", "worst": float("nan"), "deep": deep}
    session.finish(EpisodeResult("Failed", 1.0, None, "reason\0 \ud800" + 5000 * "x", about))
    tree = shown(session)
    metrics = {name: tree.extra["metrics"][name] for name in ("rate", "object", "text", "worst", "score")}
    assert metrics == {"rate": 0.5, "object": "<class 'object'>", "text": "a\\x00b", "worst": "nan", "score": 1.0}
    assert tree.extra["exit_reason"].startswith("reason\\x00 \\ud800xxx") and rewards(session) == [1.0]


def test_a_session_that_somebody_else_ended_is_left_as_it_is(client: Client) -> None:
    session = start(client)
    session.session.end(outcome="Failed", exit_reason="by hand")
    session.finish(EpisodeResult("Finished", 1.0))
    assert (session.outcome, shown(session).extra["exit_reason"]) == ("Failed", "by hand")


def test_a_session_that_has_expired_keeps_what_its_episode_earned(tmp_path: Path) -> None:
    with real_server(tmp_path, engine_arg=("tokens=9",), session_idle_s=0.5) as url, Client(url) as client:
        session = played(client, 1)
        while shown(session).status == "active":
            client.engine()
        session.finish(EpisodeResult("Finished", 2.0, [2.0]))
        assert (session.outcome, shown(session).outcome, rewards(session)) == ("Failed", None, [2.0])


def test_episodes_bring_their_own_grants_and_leave_none(client: Client) -> None:
    before = client.grant_capacity(1)
    for number in range(3):
        start(client, episode_id=number).fail(RuntimeError("broken"))
        start(client, episode_id=number).finish(EpisodeResult("Finished", 1.0))
    assert client.grant_capacity(1) == before + 1


def test_a_key_serves_one_episode_after_another(client: Client) -> None:
    ids = []
    for number in range(2):
        session = start(client, episode_id=number, api_key="sk-of-this-environment")
        assert (session.api_key, session.base_url) == (
            "sk-of-this-environment",
            f"{client.url}/~sk-of-this-environment",
        )
        turn(session)
        session.finish(EpisodeResult("Finished", float(number)))
        ids.append([sample.session_id for sample in session.exported("concat").samples])
    assert len({name for names in ids for name in names}) == 2


def test_sessions_of_validation_are_marked_so_that_nobody_trains_on_them(client: Client) -> None:
    session = played(client, 1, mode="val")
    session.finish(EpisodeResult("Finished", 1.0))
    assert shown(session).extra["metadata"]["validate"] is True
    assert client.export(filter={"group_id": session.traj_group_id, "metadata": {"mode": "val"}}).samples == []
    assert len(session.exported("concat").samples) == 1


def test_a_start_that_the_server_refuses_says_why(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        start(client, worker=Section(generating_args={"temperature": -1.0}))
    with pytest.raises(InvalidRequest, match="num_beams is 4"):
        start(client, worker=Section(generating_args={"num_beams": 4}))


def test_a_start_whose_manager_is_stopped_does_not_wait_on() -> None:
    with Client("http://127.0.0.1:9", timeout_s=5.0) as nobody, pytest.raises(ServerUnreachable):
        start(nobody, may_wait=lambda: False)
