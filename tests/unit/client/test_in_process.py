"""Clients of an application in this process: the whole API without sockets, answers read while they are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from proxy.api.turn_routes import App
from proxy.app import build_app
from proxy.client import AsyncClient
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Script
from proxy.errors import SessionNotFound
from proxy.settings import Settings
from tests.support import default_url, says, tiny_renderer, user

HELLO = [user("hello")]


def new_app(folder: Path, script: Script | None = None, **settings: Any) -> App:
    """An app on the scripted engine that nobody has started."""
    renderer = tiny_renderer()
    engine = ScriptedEngine(script or says("one", "two", "three", "four"), vocab_size=renderer.vocab_size)
    configured = Settings(**{"database_url": default_url(folder), "migrate": True, **settings})
    return build_app(configured, engine=engine, renderer=renderer)


async def test_sessions_rewards_and_exports_of_an_app_in_process(tmp_path: Path) -> None:
    async with AsyncClient(app=new_app(tmp_path, admin_key="k"), admin_key="k") as client:
        async with client.session("task") as session, client.http_client() as http:
            sdk = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http)
            reply = await sdk.chat.completions.create(model="m", messages=HELLO)
            await session.set_reward(1.0)
        [sample] = (await client.export(session_id=session.session_id)).samples
        with pytest.raises(SessionNotFound):
            await client.export(session_id="unknown")
    assert reply.choices[0].message.content == "one"
    assert sample.score == 1.0
    assert tiny_renderer().decode(sample.input_ids[sample.loss_mask == 1]).startswith("one")
