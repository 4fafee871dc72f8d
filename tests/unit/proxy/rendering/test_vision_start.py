"""What a server says of a vision model when it starts, in the doctor and at /engine; and when it cannot see."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from proxy.app import build_app
from proxy.engine.interface import Capability, EngineInfo
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.rendering.examination import SEEING, Verdict, examine
from proxy.rendering.renderer import Renderer, load_renderer
from proxy.settings import Settings
from proxy.types import ImagePart, Message, Role
from proxy.vision.model_config import is_vision_model
from tests.support import default_url, says, serving, tiny_renderer
from tokengrove.errors import ConfigurationError, InvalidRequest

TEXT_ONLY = """
import asyncio, sys, httpx
from proxy.app import build_app
from proxy.settings import Settings

async def main():
    app = build_app(Settings(engine="scripted", database_url=sys.argv[1], migrate=True))
    transport = httpx.ASGITransport(app=app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://t") as http:
        asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        for path, body in (("/s/v1/chat/completions", asked), ("/trajectories/export", {"session_id": "s"})):
            (await http.post(path, json=body)).raise_for_status()

asyncio.run(main())
print([name for name in ("PIL", "torch", "torchvision", "transformers") if name in sys.modules])
"""
"""A turn and its export, in a process of its own; prints which packages for images were imported."""

SEEN = Message(Role.USER, "Look.", images=(ImagePart("0" * 64, 0, 64, 48),))


class Blind(ScriptedEngine):
    """An engine of somebody's own that knows nothing of images."""

    def info(self) -> EngineInfo:
        known = super().info()
        return dataclasses.replace(known, capabilities=known.capabilities - {Capability.IMAGES})


def test_the_doctor_says_what_a_model_sees_and_checks_images(vision_renderer: Renderer) -> None:
    found = examine(vision_renderer)
    facts = dict(found.facts)
    assert facts["images"] == "in messages of system, user, assistant, tool; 1024 x 768 pixels take 54 tokens"
    assert facts["processor"] == "Qwen2_5_VLProcessor"
    verdicts = {check.name: check.verdict for check in found.checks}
    assert {verdicts[shape.name] for shape in SEEING} == {Verdict.HOLDS}
    assert not found.broken


def test_a_text_model_has_no_facts_of_images() -> None:
    assert not {"images", "processor"} & dict(examine(tiny_renderer()).facts).keys()


@pytest.mark.wide
def test_a_model_of_text_imports_nothing_for_images(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TEXT_ONLY, default_url(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_without_the_extra_texts_are_answered_and_the_log_says_how_to_get_it(
    vision_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = ConfigurationError("the package PIL is missing; pip install 'tokengrove[images]'")
    with mock.patch("proxy.vision.processor.load_processor", side_effect=missing):
        renderer = load_renderer(Settings(), vision_folder)
    assert "images are refused: the package PIL is missing; pip install 'tokengrove[images]'" in caplog.text
    assert renderer.render([SEEN._replace(images=())], (), {})
    with pytest.raises(InvalidRequest, match=r"images are refused: .* its log says what") as refused:
        renderer.render([SEEN], (), {})
    assert "PIL" not in refused.value.message
    assert dict(examine(renderer).facts)["images"].startswith("refused: the package PIL is missing")


def test_a_folder_sees_if_it_has_a_vision_part_and_a_processor(vision_folder: Path, tmp_path: Path) -> None:
    assert is_vision_model(vision_folder)
    assert not is_vision_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}}))
    assert not is_vision_model(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert is_vision_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    assert not is_vision_model(tmp_path)


async def test_an_engine_that_takes_no_images_is_told_at_the_start(
    tmp_path: Path, vision_renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Blind(says("x"), vocab_size=vision_renderer.vocab_size)
    app = build_app(Settings(database_url=default_url(tmp_path), migrate=True), engine=engine, renderer=vision_renderer)
    caplog.set_level(logging.WARNING)
    async with app.router.lifespan_context(app):
        assert "the engine takes no images, so they are refused" in caplog.text


async def test_engine_says_what_the_model_sees(tmp_path: Path, vision_renderer: Renderer) -> None:
    async with serving(tmp_path, says("x"), vision_renderer) as server:
        shown = (await server.http.get("/engine")).json()["images"]
        assert shown == {
            "processor": "Qwen2_5_VLProcessor",
            "roles": ["system", "user", "assistant", "tool"],
            "example_tokens": 54,
        }
    async with serving(tmp_path, says("x")) as server:
        assert (await server.http.get("/engine")).json()["images"] is None
