"""OpenEnv sessions whose agent owns its loop: what they say of it, and that they end whatever happens."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import real_server
from tests.unit.tokengrove.trl import trl_players
from tokengrove.client import Client, SessionTree
from tokengrove.errors import SessionNotFound
from tokengrove.rollout.failure_log import TooManyFailedEpisodes
from tokengrove.trl import AgentSession, SessionFactory, sessions

ASKS = (
    "import json, os, urllib.request as r; "
    "body = json.dumps({'model': 'any', 'messages': [{'role': 'user', 'content': 'Hello'}]}).encode(); "
    "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'; "
    "r.urlopen(r.Request(url, body, {'content-type': 'application/json'})).read()"
)
"""A program that makes one turn."""


@dataclass
class Verified:
    """OpenEnv's `VerifyResult`, which is not installed here."""

    env_reward: float | None = None
    done: bool = False
    metrics: Mapping[str, Any] = field(default_factory=dict)
    artifacts: Mapping[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_server(tmp_path_factory.mktemp("sessions")) as url:
        yield url


class Factories:
    """Makes factories of one server, and closes them."""

    def __init__(self, url: str) -> None:
        self.url, self._made = url, list[SessionFactory]()

    def __call__(self, agent: Any = trl_players.numbered, **options: Any) -> SessionFactory:
        self._made.append(SessionFactory(options.pop("url", self.url), agent=agent, **options))
        return self._made[-1]

    def close(self) -> None:
        trl_players.released.set()
        for factory in self._made:
            factory.close()


@pytest.fixture
def make(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Factories]:
    monkeypatch.setattr(sessions, "library", lambda name: SimpleNamespace(VerifyResult=Verified))
    monkeypatch.setattr(trl_players, "started", threading.Semaphore(0))
    trl_players.released.clear()
    factories = Factories(url)
    yield factories
    factories.close()


def tree(url: str, session: AgentSession) -> SessionTree:
    with Client(url) as client:
        return client.session_tree(session.session_id)


def test_an_agent_that_ends_gives_code_0_its_turns_and_its_reward(url: str, make: Factories) -> None:
    session = make(trl_players.cool, reward=trl_players.said).create("Name a tree.", episode_id="episode")
    assert session.wait_for_completion() == 0
    (entry,) = session.fetch_proxy_trace()
    said = entry["response"]["choices"][0]["message"]["content"]
    assert sum(entry["loss_mask"]) == len(entry["completion_token_ids"]) == 4
    assert entry["reward"] == session.verify([]).env_reward == len(said)
    verified = session.verify([])
    assert verified.done and verified.metrics["turns"] == 1
    assert verified.artifacts["session_id"] == session.session_id
    assert session.session_id.startswith("episode-")
    session.close()
    session.close()
    assert tree(url, session).outcome == "Finished"


def test_the_trainers_sampling_wins_over_the_agents(make: Factories) -> None:
    sampling = {"temperature": 0.6, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    for given, temperature, top_p in (({}, 0.1, 0.2), (sampling, 0.6, 1.0)):
        session = make(trl_players.cool, sampling=given, options={"sampling": {"max_tokens": 9}}).create("Hello")
        session.wait_for_completion()
        (entry,) = session.fetch_proxy_trace()
        used = entry["metadata"]["sampling_params"]
        assert (used["temperature"], used.get("top_p", 1.0)) == (temperature, top_p)


def test_sessions_of_one_seed_are_one_group(url: str, make: Factories) -> None:
    factory = make()
    one, same, other = (factory.create("Hello", seed=seed) for seed in (7, 7, 8))
    for session in (one, same, other):
        session.wait_for_completion()
    groups = [tree(url, session).group_id for session in (one, same, other)]
    assert groups[0] == groups[1] != groups[2]
    assert one.session_id != same.session_id


@pytest.mark.parametrize(
    ("task", "messages"),
    [
        ("Hello", [{"role": "user", "content": "Hello"}]),
        ([{"role": "system", "content": "Be kind."}], [{"role": "system", "content": "Be kind."}]),
        ({"prompt": "Hello", "answer": 1}, [{"role": "user", "content": "Hello"}]),
        ({"answer": 1}, []),
    ],
)
def test_a_task_is_a_prompt_or_a_row(make: Factories, task: Any, messages: list[Any]) -> None:
    session = make().create(task)
    assert session.initial_messages() == messages
    assert session.list_tools() == []
    with pytest.raises(KeyError, match="owns its loop"):
        session.call_tool("look", {})


def test_an_agent_that_raises_gives_code_1_and_no_reward(url: str, make: Factories) -> None:
    session = make().create({"prompt": "Hello", "fails": [0]})
    assert session.wait_for_completion() == 1
    verified = session.verify([])
    assert (verified.env_reward, verified.artifacts["failure"]) == (None, "agent")
    assert len(session.fetch_proxy_trace()) == 1
    assert tree(url, session).outcome == "Failed"


def test_so_many_failed_episodes_in_a_row_end_the_rollouts_with_the_reasons(
    make: Factories, caplog: pytest.LogCaptureFixture
) -> None:
    factory = make()
    for seed in (1, 1, 2, 2, 3):
        assert factory.create({"fails": [0]}, seed).wait_for_completion(60) == 1
    with pytest.raises(TooManyFailedEpisodes, match=r"^6 episodes in a row have failed.* 6 x ValueError, such as task"):
        factory.create({"fails": [0]}, 3).wait_for_completion(60)
    assert "an episode failed: ValueError: sample 0 has failed" in caplog.text and "Traceback" in caplog.text
    assert factory.create({}, 4).wait_for_completion(60) == 0


def test_an_agent_whose_time_is_over_is_a_timeout_with_the_turns_that_it_made(url: str, make: Factories) -> None:
    session = make(trl_players.late).create("Hello")
    with pytest.raises(TimeoutError, match=session.session_id):
        session.wait_for_completion()
    assert len(session.fetch_proxy_trace()) == 1
    assert session.verify([]).env_reward is None
    assert tree(url, session).outcome == "Timeout"


def test_an_agent_has_no_more_time_than_the_factory_gives_it(url: str, make: Factories) -> None:
    session = make(trl_players.waits, timeout_s=0.1).create("Hello")
    with pytest.raises(TimeoutError, match=session.session_id):
        session.wait_for_completion()
    assert tree(url, session).outcome == "Timeout"


def test_a_caller_that_waits_no_longer_ends_the_agent(url: str, make: Factories) -> None:
    session = make(trl_players.waits).create("Hello")
    assert trl_players.started.acquire(timeout=60)
    with pytest.raises(TimeoutError, match=r"has not ended in 0\.01 s"):
        session.wait_for_completion(0.01)
    assert tree(url, session).status == "ended"


def test_closing_wakes_whoever_waits_and_ends_the_session(url: str, make: Factories) -> None:
    session = make(trl_players.waits).create("Hello")
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            session.wait_for_completion()
        except RuntimeError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert trl_players.started.acquire(timeout=60)
    assert session.verify([]) == Verified(artifacts={"session_id": session.session_id})
    session.close()
    waiting.join()
    assert [str(error) for error in raised] == [f"session {session.session_id!r} was closed while its agent ran"]
    assert tree(url, session).outcome == "Failed"


def test_closing_the_factory_ends_what_runs(url: str, make: Factories) -> None:
    factory = make(trl_players.waits)
    session = factory.create("Hello")
    assert trl_players.started.acquire(timeout=60)
    factory.close()
    factory.close()
    assert tree(url, session).status == "ended"
    with pytest.raises(RuntimeError, match="is closed"):
        factory.create("Hello")


def test_a_server_that_is_gone_is_an_error_and_no_rollout(make: Factories) -> None:
    session = make(url="http://127.0.0.1:9", start_timeout_s=0.0).create("Hello")
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1:9"):
        session.wait_for_completion()
    session.close()


def test_a_session_that_never_started_has_no_trace(make: Factories) -> None:
    session = make("tests.unit.tokengrove.trl.trl_players:nobody").create("Hello")
    assert session.wait_for_completion() == 1
    with pytest.raises(SessionNotFound):
        session.fetch_proxy_trace()


def test_an_unmodified_command_plays_too(url: str, make: Factories) -> None:
    session = make([sys.executable, "-c", ASKS], reward=trl_players.said).create("Hello")
    assert session.wait_for_completion() == 0
    (entry,) = session.fetch_proxy_trace()
    assert session.verify([]).env_reward == len(entry["response"]["choices"][0]["message"]["content"])
    assert tree(url, session).outcome == "Finished"
