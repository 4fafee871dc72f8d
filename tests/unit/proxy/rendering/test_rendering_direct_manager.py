"""Prompts of ROLL's direct manager are those of a chat session, token by token, with templates of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.app import build_app
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Reply, play
from proxy.rendering import load_renderer
from proxy.settings import Settings
from proxy.types import ids_of
from tests.support import default_url, system, user
from tests.unit.tokengrove.roll.roll_queues import Queue
from tokengrove.client import Client
from tokengrove.roll import DataProto, Section, TrajEnvManager

SYSTEM, OBSERVATIONS = "You play.", ["begin", "first", "second", "over"]
ENV = {"tag": "T", "group_id": 0, "env_id": 0, "group_seed": 0, "max_steps": 3}
OPTIONS = {"chat_template_kwargs": {"enable_thinking": False}}


class Manager(TrajEnvManager):
    """Plays three turns, whose observations are the user's messages."""

    def _make_environment(self) -> Any:
        return Game()


class Game:
    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.at = 0
        return OBSERVATIONS[0], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.at += 1
        return OBSERVATIONS[self.at], 1.0, self.at == 3, False, {}


@pytest.mark.parametrize("name", ["cohere2", "deepseekv3", "gemma3", "glm4moe", "gptoss", "qwen3"])
def test_the_tokens_of_an_episode_are_those_of_a_chat(
    published: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    renderer = load_renderer(Settings(), published(name))
    end = ids_of([renderer.stop_token_ids[0]])
    answers = [renderer.encode("one") + end, renderer.encode("two"), renderer.encode("three") + end]  # one is cut
    engine = ScriptedEngine(play([Reply(ids) for ids in [*answers, *answers]]), vocab_size=renderer.vocab_size)
    app = build_app(Settings(database_url=default_url(tmp_path), migrate=True), engine=engine, renderer=renderer)
    queue, pipeline = Queue(1), Section(sequence_length=2048, custom_envs={})
    with Client(app=app) as client:
        entry = {**ENV, "agent_system_template": SYSTEM, "agent_template": "{observation}"}
        manager = Manager(Section(), pipeline, entry, None, client, queue)
        manager.run_rollout_loop(DataProto(meta_info={"seed": 0}))
        with client.session("chat") as session, client.http_client() as http:
            messages = [system(SYSTEM)]
            for observation in OBSERVATIONS[:3]:
                messages.append(user(observation))
                body = {"model": "m", "messages": messages, **OPTIONS}
                answer = http.post(f"{session.base_url}/chat/completions", json=body)
                messages.append(answer.json()["choices"][0]["message"])
        [chat] = client.export(session_id=session.session_id).samples
    [rollout] = queue.rollouts
    count = len(chat.input_ids)
    assert rollout.batch["input_ids"][0, :count].tolist() == chat.input_ids.tolist()
    assert rollout.batch["response_mask"][0, :count].tolist() == chat.loss_mask.tolist()
    assert rollout.batch["attention_mask"].sum() == count
