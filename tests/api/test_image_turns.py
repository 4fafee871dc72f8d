"""Turns of a model that sees, on the scripted engine: their prompts, spans, and what engines get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proxy.rendering.renderer import Renderer
from proxy.types import Api, ImageFile, Message, Role, TurnRequest
from tests.support import Server, says, serving, user
from tests.vision import image_file, part


async def turn(server: Server, messages: list[Message], *files: ImageFile) -> Any:
    """Run a turn of the session `s`, and return its interaction."""
    state = server.app.state
    request = TurnRequest(Api.CHAT, "m", tuple(messages), files={file.digest: file for file in files})
    session = await state.registry.get("s")
    [choice] = await state.turns.begin(session, request, new_id=lambda: f"turn-{len(server.engine.requests)}")
    return await choice.ended


async def test_a_turn_with_images_bridges_and_stores_where_its_images_are(
    tmp_path: Path, vision_renderer: Renderer
) -> None:
    first, second = image_file(100, 80), image_file(300, 200, 1)
    async with serving(tmp_path, says("Hello.", "One.", "Two."), vision_renderer) as server:
        await server.chat([user("first of all")])
        asked = [Message(Role.USER, "Look: ", images=(part(first, 6),))]
        one = await turn(server, asked, first)
        answered = [*asked, one.output, Message(Role.USER, "And?", images=(part(second),))]
        two = await turn(server, answered, second)
        for interaction in (one, two):
            assert interaction.aligned == (interaction is two)
            [placed] = interaction.images
            assert interaction.prefix_length <= placed.start < interaction.prompt_tokens
        assert two.images[0].length == 54
        engine_saw = [request.images for request in server.engine.requests[1:]]
        assert [[image.digest for image in seen.placed] for seen in engine_saw] == [
            [first.digest],
            [first.digest, second.digest],
        ]
        assert await engine_saw[1].read() == [first, second]
        assert server.prompts()[2] == list(vision_renderer.render(answered, (), {}))
