"""Runners that users write: set up once, one turn for each request, and a result whatever ends an episode."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.app import build_app
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Reply, Script, play
from proxy.settings import Settings
from tests.support import call_text, default_url, function_tool, real_server, sampled, says, tiny_renderer, user
from tokengrove.client import Client, Session
from tokengrove.errors import InvalidRequest
from tokengrove.roll import AgentRunner, EpisodeResult
from tokengrove.roll.runners import EpisodeTimeout, RequestError, played
from tokengrove.roll.runners.agent_runner import step_rewards


class Counting:
    """A game: three rewards that grow, then it is over."""

    def reset(self, seed: int) -> str:
        self.at = 0
        return f"game {seed}"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.at += 1
        return f"{action} was heard", float(self.at), self.at == 3, False, {}


class CountingRunner(AgentRunner):
    def __init__(self, base_url: str, env_id: int, env_config: Any, **kwargs: Any) -> None:
        super().__init__(base_url, env_id, env_config, **kwargs)
        self.made = 0

    def setup(self) -> None:
        self.made += 1
        self.env = Counting()

    def run_job(self, seed: int) -> EpisodeResult:
        messages: list[Any] = [user(self.env.reset(seed=seed))]
        with httpx.Client(timeout=60) as client:
            for _ in range(10):
                message = self._llm_request(client, messages)["choices"][0]["message"]
                observation, reward, done, _, _ = self.env.step(message["content"])
                self.step_scores.append(reward)
                messages += [message, user(observation)]
                if done:
                    break
        return EpisodeResult("Finished", sum(self.step_scores), self.step_scores)


@contextmanager
def in_process(folder: Path, script: Script, **settings: Any) -> Iterator[Client]:
    """A client of an app on the scripted engine, without sockets."""
    engine = ScriptedEngine(script, vocab_size=tiny_renderer().vocab_size)
    configured = Settings(database_url=default_url(folder), migrate=True, **settings)
    app = build_app(configured, engine=engine, renderer=tiny_renderer())
    with Client(app=app, admin_key=settings.get("admin_key")) as client:
        yield client


def of_session(session: Session, client: Client, kind: type[AgentRunner] = CountingRunner, **config: Any) -> Any:
    runner = kind(session.base_url, 7, config)
    runner.http_client = client.http_client()
    return runner


def test_each_request_of_a_runner_is_a_turn_with_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    with in_process(tmp_path, says("up", "down", "left")) as client:
        session = client.start_session("t")
        result = of_session(session, client).run_job(5)
        session.end()
        (sample,) = client.export(session_id=session.session_id).samples
    assert result.to_dict() == {
        "status": "Finished",
        "score": 6.0,
        "step_scores": [1.0, 2.0, 3.0],
        "agent_exit_reason": "",
    }
    trained = sample.input_ids[sample.loss_mask == 1].tolist()
    assert trained == [*sampled("up"), *sampled("down"), *sampled("left")]


def test_requests_go_to_the_session_of_the_environment_by_its_number(tmp_path: Path) -> None:
    with real_server(tmp_path, engine_arg=("tokens=4",)) as url, Client(url) as client:
        sessions = [client.start_session("t", api_key=f"slot-{env_id}") for env_id in (0, 1)]
        by_number = client.start_session("t", api_key="12")
        assert CountingRunner(url, 12, {}).run_job(1).score == 6.0
        assert CountingRunner(f"{url}/", 0, {}, api_key="slot-0").run_job(1).score == 6.0
        turns = [len(client.session_tree(each.session_id).interactions) for each in (*sessions, by_number)]
    assert turns == [3, 0, 3]


def test_a_runner_sets_itself_up_once_and_again_after_a_teardown() -> None:
    class Played(CountingRunner):
        down = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.setup()

        def setup(self) -> None:
            super().setup()
            self.env.at = -1

        def run_job(self, seed: int) -> EpisodeResult:
            return EpisodeResult("Finished", self.env.at)

        def teardown(self) -> None:
            self.down += 1

    with Played("http://t", 1, {}) as runner:
        runner.setup()
        assert [runner.run_job(0).score, runner.run_job(1).score] == [-1, -1]
        assert (runner.made, runner.down) == (1, 0)
    assert runner.down == 1
    runner.run_job(2)
    assert runner.made == 2


def test_a_setup_that_failed_is_done_again() -> None:
    class Flaky(CountingRunner):
        def setup(self) -> None:
            super().setup()
            if self.made == 1:
                raise OSError("no room")

        def run_job(self, seed: int) -> EpisodeResult:
            return EpisodeResult("Finished", self.made)

    runner = Flaky("http://t", 1, {})
    runner.step_scores = [9.0]  # of an episode before
    assert played(runner, 1).score == 0
    runner = Flaky("http://t", 1, {})
    assert played(runner, 1).agent_exit_reason == "OSError: no room"
    assert played(runner, 1).score == 2


def test_a_runner_whose_init_does_not_call_the_base_runs() -> None:
    class Bare(AgentRunner):
        def __init__(self) -> None:
            self.made = 0

        def setup(self) -> None:
            self.made += 1

        def run_job(self, seed: int) -> EpisodeResult:
            return EpisodeResult("Finished", self.made)

    runner = Bare()
    runner.run_job(1)
    assert runner.run_job(2).score == 1


def test_an_error_of_the_server_has_its_text(tmp_path: Path) -> None:
    with in_process(tmp_path, says("up")) as client:
        runner = of_session(client.start_session("t"), client)
        with pytest.raises(RequestError) as caught:
            runner._llm_request(None, [{"role": "nobody", "content": "x"}])
    assert isinstance(caught.value, httpx.HTTPError)
    assert caught.value.status == 400
    assert str(caught.value).startswith("400 ") and "messages[0].role" in str(caught.value)
    assert not caught.value.is_limit


def test_the_errors_of_another_server_are_read_as_well() -> None:
    def told(status: int, **body: Any) -> RequestError:
        client = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(status, **body)))
        with pytest.raises(RequestError) as caught:
            CountingRunner("http://t/~secret", 1, {}, api_key="secret")._llm_request(client, [])
        return caught.value

    full = told(400, json={"error": "Sequence length exceeded", "stop_reason": "max_length"})
    assert full.is_limit and str(full) == "400 Sequence length exceeded"
    pickled = pickle.dumps(full)
    assert b"secret" not in pickled  # the key is in the address and in a header
    sent = pickle.loads(pickled)
    assert (sent.status, sent.is_limit, str(sent)) == (400, True, str(full))
    assert str(told(502, text="<html>bad gateway</html>")) == "502 <html>bad gateway</html>"


def test_the_key_in_an_address_is_in_no_reason_and_no_line(caplog: pytest.LogCaptureFixture) -> None:
    class Raising(AgentRunner):
        def run_job(self, seed: int) -> EpisodeResult:
            request = httpx.Request("POST", f"{self.base_url}/v1/chat/completions")
            httpx.Response(502, request=request).raise_for_status()
            raise AssertionError

    for secret in ("/~slot-secret", "/task-1~secretsecretsecretsecr"):
        result = played(Raising(f"http://t{secret}", 1, {}), 1)
        assert "502" in result.agent_exit_reason and "~.../v1" in result.agent_exit_reason
    assert "secret" not in caplog.text + result.agent_exit_reason


def test_what_was_earned_before_a_failure_is_kept(tmp_path: Path) -> None:
    with in_process(tmp_path, says("up", "down")) as client:  # the third request fails
        result = played(of_session(client.start_session("t"), client), 1)
    assert (result.status, result.score, result.step_scores) == ("Failed", 3.0, [1.0, 2.0])
    assert "the script has no reply left" in result.agent_exit_reason
    assert isinstance(result.error, httpx.HTTPError)


def test_what_the_environment_gave_is_kept_though_the_runner_kept_it_to_itself(tmp_path: Path) -> None:
    class Local(CountingRunner):
        """As ROLL's documentation writes runners."""

        def run_job(self, seed: int) -> EpisodeResult:
            obs = self.env.reset(seed=seed)
            rewards = []
            with httpx.Client(timeout=60) as client:
                for _ in range(self.max_steps):
                    resp = self._llm_request(client, [user(obs)])
                    obs, reward, done, _, _ = self.env.step(resp["choices"][0]["message"]["content"])
                    rewards.append(reward)
                    if done:
                        break
            return EpisodeResult(status="Finished", score=sum(rewards), step_scores=rewards)

    with in_process(tmp_path, says("up", "down", "left", "one more")) as client:
        runner = of_session(client.start_session("t"), client, Local)
        finished, failed = played(runner, 1), played(runner, 2)
    assert (finished.status, finished.step_scores) == ("Finished", [1.0, 2.0, 3.0])
    assert (failed.status, failed.score, failed.step_scores) == ("Failed", 1.0, [1.0])
    assert vars(runner.env) == {"at": 1}


def test_an_environment_that_cannot_be_observed_is_left_alone() -> None:
    class Slots:
        __slots__ = ()

        def step(self) -> tuple[str, float, bool, dict[str, Any]]:
            return "", 1.0, False, {}

    class Own:
        def __init__(self) -> None:
            self.step = lambda: ("", 1.0, False, {})

    for env in (Slots(), Own(), None, object()):
        with step_rewards(env) as seen:
            if env is not None and hasattr(env, "step"):
                env.step()
        assert seen == []


def test_a_failing_environment_is_a_failed_episode_and_the_next_is_played(tmp_path: Path) -> None:
    class Breaks(CountingRunner):
        def run_job(self, seed: int) -> EpisodeResult:
            if seed == 0:
                raise ZeroDivisionError("the game has no board")
            return super().run_job(seed)

    with in_process(tmp_path, says("up", "down", "left")) as client:
        runner = of_session(client.start_session("t"), client, Breaks)
        results = [played(runner, seed) for seed in (0, 1)]
    assert [result.status for result in results] == ["Failed", "Finished"]
    assert results[0].agent_exit_reason == "ZeroDivisionError: the game has no board"
    assert [result.score for result in results] == [0.0, 6.0]


def test_a_full_context_ends_an_episode_with_what_was_earned(tmp_path: Path) -> None:
    with in_process(tmp_path, says("up", "down", "left")) as client:
        session = client.start_session("t", limits={"max_turns": 2})
        result = played(of_session(session, client), 1)
    assert (result.status, result.score, result.metrics) == ("Finished", 3.0, {"truncated": True})
    assert "RequestError: 403 " in result.agent_exit_reason


@pytest.mark.parametrize("setting", ["http_timeout", "episode_timeout"])
def test_a_request_that_takes_too_long_is_a_timeout(tmp_path: Path, setting: str) -> None:
    class Impatient(CountingRunner):
        def run_job(self, seed: int) -> EpisodeResult:
            self.step_scores.append(0.5)
            with httpx.Client(timeout=self.http_timeout) as client:
                self._llm_request(client, [user("hello")])
            raise AssertionError

    with real_server(tmp_path, engine_arg=("delay_s=60",)) as url, Client(url) as client:
        session = client.start_session("t")
        result = played(Impatient(session.base_url, 7, {setting: 0.05}), 1)
        session.end()
    assert (result.status, result.score) == ("Timeout", 0.5)


def test_a_request_to_a_server_in_this_process_has_its_time_too(tmp_path: Path) -> None:
    with in_process(tmp_path, play([Reply(sampled("late"), delay_s=60)])) as client:
        result = played(of_session(client.start_session("t"), client, http_timeout=0.05), 1)
    assert result.status == "Timeout"


def test_no_request_is_sent_after_the_time_of_the_episode() -> None:
    class Slow(CountingRunner):
        def run_job(self, seed: int) -> EpisodeResult:
            self._llm_request(None, [])
            raise AssertionError

    result = played(Slow("http://t", 7, {"config": {"episode_timeout": 0}}), 1)
    assert result.status == "Timeout"
    assert result.agent_exit_reason.startswith(EpisodeTimeout.__name__)


def test_any_client_with_post_sends_the_request() -> None:
    class Other:
        """As of another library: an answer has `status_code`, `json()` and `text`."""

        def post(self, url: str, json: Any, headers: Any) -> Any:
            self.sent = url, json, headers
            return httpx.Response(200, json={"choices": []})

    client = Other()
    assert CountingRunner("http://t/v1", 12, {})._llm_request(client, [user("hi")]) == {"choices": []}
    body = {"messages": [user("hi")], "tools": [], "tool_choice": "none"}
    assert client.sent == ("http://t/v1/chat/completions", body, {"Authorization": "Bearer 12"})
    CountingRunner("http://t", 12, {"model": "large"}, api_key="k")._llm_request(client, [user("hi")])
    assert client.sent[1:] == ({"model": "large", **body}, {"Authorization": "Bearer k"})


def test_tools_are_sent_with_the_choice_of_tool(tmp_path: Path) -> None:
    script = play([Reply(sampled(call_text("look", "{}"))), Reply(sampled("no call"))])
    with in_process(tmp_path, script) as client:
        runner = of_session(client.start_session("t"), client)
        called = runner._llm_request(None, [user("look")], tools=[function_tool("look")])
        spoken = runner._llm_request(None, [user("say")], tools=[function_tool("look")], tool_choice="none")
    (call,) = called["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": "{}"}
    assert spoken["choices"][0]["message"]["content"] == "no call"


def test_the_configuration_is_read_by_attribute_and_key() -> None:
    config = {"env_type": "counting", "max_steps": 3, "config": {"dim": [6, 6], "mode": "val", "names": {0: "#"}}}
    runner = CountingRunner("http://t", 1, config, worker_config="of the manager", something="for subclasses")
    assert runner.env_config.max_steps == runner.env_config["max_steps"] == 3
    assert runner.env_config.config.dim == [6, 6]
    assert (runner.env_params, runner.mode) == ({"dim": [6, 6], "mode": "val", "names": {0: "#"}}, "val")
    assert type(runner.env_params["names"]) is dict
    assert (runner.env, runner.worker_config) == (None, "of the manager")
    as_in_yaml = CountingRunner("http://t", 1, {"env_config": {"dim": 1}})
    assert (as_in_yaml.env_params, as_in_yaml.mode) == ({"dim": 1}, "train")


@pytest.mark.parametrize(("name", "value"), [("episode_timeout", "soon"), ("http_timeout", -5), ("max_steps", [])])
def test_a_setting_that_is_no_number_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be a number, 0 or more") as caught:
        CountingRunner("http://t", 1, {name: value})
    assert caught.value.param == name


def test_a_runner_without_run_job_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="run_job"):
        AgentRunner("http://t", 1, {})  # type: ignore[abstract]
