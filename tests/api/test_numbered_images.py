"""Templates that number the images of a conversation, as Qwen's do with `add_vision_id`: a turn goes on counting."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from proxy.engine.scripted.scripts import Reply, play
from proxy.rendering.renderer import Renderer, load_renderer
from proxy.settings import Settings
from tests.support import serving, user
from tests.vision import image_url, png, text_part
from tests.vision_families import NUMBERED, made, write_family

OPTIONS = {"chat_template_kwargs": {"add_vision_id": True}}


@pytest.fixture(scope="module")
def numbering(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("numbering")
    write_family(folder, "gemma3", NUMBERED)
    with mock.patch("proxy.vision.processor.load_processor", lambda folder: made("gemma3")[0]):
        return load_renderer(Settings(), folder)


def shows(*numbers: int) -> dict[str, Any]:
    return user([text_part("Look."), *(image_url(png(64, 64, number)) for number in numbers)])  # type: ignore[arg-type]


async def test_a_turn_goes_on_counting_where_its_parent_and_a_loop_with_its_own_ids_left_off(
    tmp_path: Path, numbering: Renderer
) -> None:
    said = numbering.encode("One.<|im_end|>")
    async with serving(tmp_path, play([Reply(said)] * 2), numbering) as server:
        history = [shows(1, 2)]
        history.append((await server.chat(history, **OPTIONS))["choices"][0]["message"])
        history.append(shows(3))
        await server.chat(history, **OPTIONS)
        first, second = [list(request.input_ids) for request in server.engine.requests]
        known = [*first, *said]
        where = {"messages": 2, "token_ids": known, "output_tokens": len(said)}
        reply = await server.ok("/v1/tokenize", {"messages": history, "continue_from": where, **OPTIONS})
    assert second[: len(known)] == known and reply["tokens"] == second
    text = numbering.decode(server.engine.requests[1].input_ids)
    assert [text.count(f"Picture {number}: ") for number in (1, 2, 3, 4)] == [1, 1, 1, 0]
