"""A seed on an engine that does not promise equal tokens: it is passed on, and the turn says that it is best effort."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.interface import Capability, EngineInfo
from proxy.engine.scripted.engine import ScriptedEngine
from tests.support import Server, says, serving, user

CHAT, RESPONSES, GENERATE = "/s/v1/chat/completions", "/s/v1/responses", "/s/v1/generate"
BODIES: dict[str, Any] = {
    CHAT: {"messages": [user("hi")], "seed": 7},
    RESPONSES: {"input": "hi", "seed": 7},
    GENERATE: {"input_ids": [1, 2], "sampling_params": {"sampling_seed": 7}},
}


@pytest.fixture
def loose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes seeds, but does not promise equal tokens."""
    info = ScriptedEngine.info

    def shown(self: ScriptedEngine) -> EngineInfo:
        found = info(self)
        return replace(found, capabilities=found.capabilities - {Capability.DETERMINISTIC})

    monkeypatch.setattr(ScriptedEngine, "info", shown)


async def noted(server: Server) -> list[Any]:
    return [node["notes"].get("best_effort") for node in await server.tree()]


@pytest.mark.usefixtures("loose")
@pytest.mark.parametrize("path", BODIES)
async def test_a_seed_is_passed_on_and_recorded_as_best_effort(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        await server.ok(path, BODIES[path])
        await server.chat([user("without")])
        assert [request.sampling.seed for request in server.engine.requests] == [7, None]
        assert await noted(server) == [["seed"], None]
        turns = [turn for sample in await server.export() for turn in sample["turns"]]
        assert [turn["best_effort"] for turn in turns] == [["seed"], []]
        assert turns[0]["sampling"]["seed"] == 7
    async with serving(tmp_path, says()) as server:
        assert await noted(server) == [["seed"], None]


@pytest.mark.usefixtures("loose")
async def test_each_choice_has_its_own_seed_and_the_seed_of_a_session_counts_too(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two", "three")) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "sampling": {"seed": 2**63 - 2}})
        await server.chat([user("hi")], n=3)
        assert [request.sampling.seed for request in server.engine.requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
        assert await noted(server) == [["seed"]] * 3


async def test_turns_of_a_session_with_a_seed_have_seeds_of_their_own_and_a_request_keeps_its_own(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, says("one", "two", "three", "four")) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "sampling": {"seed": 40}})
        for given in ({}, {}, {"seed": 7}, {}):
            await server.ok("/s/v1/chat/completions", {"messages": [user("what is here?")], **given})
        assert [request.sampling.seed for request in server.engine.requests] == [40, 41, 7, 43]


@pytest.mark.usefixtures("loose")
@pytest.mark.parametrize("path", [*BODIES, "/v1/generate"])
async def test_strict_sampling_refuses_a_seed_that_is_only_best_effort(tmp_path: Path, path: str) -> None:
    body = BODIES[GENERATE if path.endswith("generate") else path]
    async with serving(tmp_path, says("one"), strict_sampling=True) as server:
        error = (await server.post(path, body)).json()["error"]
        assert error["code"] == "unsupported_parameter"
        assert error["param"] == ("sampling_params.seed" if path.endswith("generate") else "seed")
        assert "--strict-sampling" in error["message"]
        assert server.engine.requests == []
        await server.chat([user("without")])


@pytest.mark.parametrize("strict", [False, True])
async def test_a_seed_on_a_deterministic_engine_is_exact(tmp_path: Path, strict: bool) -> None:
    async with serving(tmp_path, says("one"), strict_sampling=strict) as server:
        await server.ok(CHAT, BODIES[CHAT])
        assert await noted(server) == [None]
