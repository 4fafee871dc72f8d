"""The games played over a live server: texts and tool calls, with the tokens of each turn."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gem")

from proxy.app import build_app
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.settings import Settings
from tests.support import call_text, default_url, sampled, says, tiny_renderer
from tokengrove.client import Client
from tokengrove.roll import GEMRunner, ToolCallRunner
from tokengrove.roll.envs.frozen_lake import find, generate_map

KEY = "the-key-of-one-slot"


def played(folder: Path, kind: type[GEMRunner], env_config: dict[str, Any], *texts: str) -> tuple[Any, Any, Any]:
    """The result of an episode, its export and the engine; the runner has an address with the slot's key."""
    engine = ScriptedEngine(says(*texts), vocab_size=tiny_renderer().vocab_size)
    settings = Settings(database_url=default_url(folder), migrate=True)
    app = build_app(settings, engine=engine, renderer=tiny_renderer())
    with Client(app=app) as client:
        session = client.start_session("t", api_key=KEY, sampling={"max_tokens": 64})
        runner = kind(base_url=f"{client.url}/~{KEY}", env_id=3, env_config=env_config)
        runner.http_client = client.http_client()
        with runner:
            result = runner.run_job(5)
        session.end(step_scores=result.step_scores, align="first")
        return result, client.export(session_id=session.session_id, layout="concat"), engine


def moving(direction: str) -> str:
    return call_text("move_player", json.dumps({"direction": direction}))


def test_a_lake_is_crossed_by_answers(tmp_path: Path) -> None:
    lake = generate_map(random.Random(5), 2, 1.0)
    start, goal = find(lake, "S"), find(lake, "G")
    words = ["Down"] * (goal[0] > start[0]) + ["Up"] * (goal[0] < start[0])
    words += ["Right"] * (goal[1] > start[1]) + ["Left"] * (goal[1] < start[1])
    config = {"env_type": "frozen_lake", "config": {"size": 2, "p": 1.0, "is_slippery": False, "format_penalty": -0.5}}
    said = ["which way?", *(f"<answer>{word}</answer>" for word in words)]
    result, exported, _ = played(tmp_path, GEMRunner, config, *said)
    assert (result.status, result.step_scores) == ("Finished", [-0.5, *[0.0] * (len(words) - 1), 1.0])
    assert result.metrics["success"] == 1 and result.metrics["format_penalty"] == -0.5 / len(said)
    (sample,) = exported.samples
    assert sample.input_ids[sample.loss_mask == 1].tolist() == [token for text in said for token in sampled(text)]


def test_a_wrong_call_stays_in_the_conversation_with_its_error(tmp_path: Path) -> None:
    config = {
        **{"env_type": "sokoban_tool_call", "max_steps": 3},
        "config": {"dim_room": (8, 8), "num_boxes": 2, "format_penalty": -0.2, "tool_call_parser": "qwen25"},
    }
    said = [moving("invalid"), moving("up"), moving("down")]
    result, exported, engine = played(tmp_path, ToolCallRunner, config, *said)
    assert result.status == "Finished" and result.step_scores[0] == -0.2 and len(result.step_scores) == 3
    (sample,) = exported.samples
    assert sample.input_ids[sample.loss_mask == 1].tolist() == [token for text in said for token in sampled(text)]
    assert "Error: the direction must be" in tiny_renderer().decode(engine.requests[-1].input_ids)
    assert sample.reward == pytest.approx(sum(result.step_scores))
