"""Turns of a vision model, on the scripted engine: their prompts, spans, and what engines get."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from proxy.engine.scripted.scripts import Reply, play
from proxy.rendering.renderer import Renderer, load_renderer
from proxy.settings import Settings
from proxy.types import Api, Ids, ImageFile, Message, Role, TurnRequest, ids_of
from proxy.vision.processor import VisionProcessor
from tests.support import Server, sampled, says, serving, user
from tests.vision import data_url, image_file, image_url, part, png, text_part
from tokengrove.errors import ConfigurationError, InvalidRequest


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


async def generated(server: Server, ids: Ids, *files: ImageFile) -> Any:
    """Run a turn of the session `s` that sends token ids and images, and return its interaction."""
    state = server.app.state
    request = TurnRequest(
        Api.GENERATE,
        "m",
        (),
        input_ids=ids,
        images=tuple(part(file) for file in files),
        files={file.digest: file for file in files},
    )
    session = await state.registry.get("s")
    [choice] = await state.turns.begin(session, request, new_id=lambda: f"turn-{len(server.engine.requests)}")
    return await choice.ended


async def test_token_ids_are_continued_by_their_images_too(tmp_path: Path, vision_renderer: Renderer) -> None:
    """Two pictures of one size have equal tokens, and the session goes on from the one that was sent."""
    red, blue = image_file(100, 80, 1), image_file(100, 80, 2)
    ids = vision_renderer.render([Message(Role.USER, "Look.", images=(part(red, 5),))], (), {})
    async with serving(tmp_path, says("Hello.", "Red.", "Blue.", "Still red."), vision_renderer) as server:
        await server.chat([user("first of all")])
        of_red, of_blue = await generated(server, ids, red), await generated(server, ids, blue)
        assert of_red.prompt_suffix == of_blue.prompt_suffix
        longer = ids + of_red.output_ids + vision_renderer.encode("And?")
        again = await generated(server, longer, red)
        assert (again.parent_id, again.aligned, again.images) == (of_red.id, True, ())
        [first, second] = [of_red.images, of_blue.images]
        assert (first[0].digest, second[0].digest) == (red.digest, blue.digest)
        assert of_red.new_messages[0].images[0].digest == red.digest
        assert "<|image_pad|>" not in of_red.new_messages[0].content


async def test_an_image_that_begins_what_token_ids_add_is_an_image_of_their_turn(
    tmp_path: Path, vision_renderer: Renderer
) -> None:
    file, text = image_file(100, 80), vision_renderer.encode("Read this.")
    assert vision_renderer.images is not None
    core = vision_renderer.images.core(part(file))
    async with serving(tmp_path, says("Hello.", "One.", "Two."), vision_renderer) as server:
        await server.chat([user("first of all")])
        first = await generated(server, text + core, file)
        assert first.new_messages[0].content[: first.new_messages[0].images[0].at] == "Read this."
        longer = text + core + first.output_ids
        again = await generated(server, longer + core + text, file, file)
    assert (again.parent_id, again.prefix_length) == (first.id, len(longer))
    assert [(image.start, image.length) for image in again.images] == [(len(longer), len(core))]
    assert (again.new_messages[0].content, again.new_messages[0].images[0].at) == ("Read this.", 0)


async def test_one_placeholder_is_expanded_and_other_counts_are_refused(
    tmp_path: Path, vision_renderer: Renderer
) -> None:
    file = image_file(100, 80)
    ids = vision_renderer.render([Message(Role.USER, "Look.", images=(part(file, 5),))], (), {})
    assert vision_renderer.images is not None
    pad = vision_renderer.images.token
    place = ids.index(pad)
    one = ids[: place + 1] + ids[place + ids.count(pad) :]
    async with serving(tmp_path, says("Hello.", "One."), vision_renderer) as server:
        await server.chat([user("first of all")])
        with pytest.raises(InvalidRequest, match=r"image 0 takes 12 tokens .* has 2 in its place"):
            await generated(server, ids[: place + 2] + ids[place + ids.count(pad) :], file)
        with pytest.raises(InvalidRequest, match="has the tokens of 1 images, but 2 images came"):
            await generated(server, ids, file, file)
        with pytest.raises(InvalidRequest, match="more tokens of images than the 0 images"):
            await generated(server, ids)
        assert len(server.prompts()) == 1
        await generated(server, one, file)
        assert server.prompts()[1] == list(ids)


async def test_a_session_that_was_read_from_the_database_goes_on_with_its_images(
    tmp_path: Path, vision_renderer: Renderer
) -> None:
    first, second = image_file(100, 80), image_file(300, 200, 1)
    async with serving(tmp_path, says("Hello.", "One.", "Two."), vision_renderer) as server:
        await server.chat([user("first of all")])
        asked = [Message(Role.USER, "Look: ", images=(part(first, 6),))]
        one = await turn(server, asked, first)
        server.forget_sessions()
        two = await turn(server, [*asked, one.output, Message(Role.USER, "And?", images=(part(second),))], second)
        assert (two.parent_id, two.aligned) == (one.id, True)
        assert [image.digest for image in two.images] == [second.digest]
        seen = server.engine.requests[-1].images
        assert seen is not None
        assert seen.placed == one.images + two.images
        assert [file.digest for file in await seen.read()] == [first.digest, second.digest]


def encoded_anew(data: bytes) -> bytes:
    """The same picture as a PNG of other bytes."""
    from PIL import Image

    out = io.BytesIO()
    Image.open(io.BytesIO(data)).save(out, "PNG", compress_level=1)
    assert out.getvalue() != data
    return out.getvalue()


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda: encoded_anew(png(100, 80)), "encoded_anew"),
        (lambda: png(100, 80, 1), "images"),
        (lambda: png(100, 80), None),
    ],
    ids=["the same picture", "another picture", "the same bytes"],
)
async def test_a_turn_says_why_its_images_fork_the_conversation(
    tmp_path: Path, vision_renderer: Renderer, other: Callable[[], bytes], why: str | None
) -> None:
    def asking(data: bytes) -> dict[str, Any]:
        return {"role": "user", "content": [text_part("What is it?"), image_url(data)]}

    async with serving(tmp_path, says("A cat.", "A dog."), vision_renderer) as server:
        answer = await server.answer([asking(png(100, 80))])
        await server.answer([asking(other()), answer, user("Sure?")])
        shown = await server.http.get("/rl/sessions/s/interactions/1", params={"include": "compared"})
        compared = shown.json()["compared"]
        assert (compared or {}).get("why") == why
        tree = (await server.http.get("/rl/sessions/s", params={"include": "compared"})).json()
        assert (tree["interactions"][1]["compared"] or {}).get("why") == why


async def test_a_conversation_with_images_is_counted_as_its_turn_is(tmp_path: Path, vision_renderer: Renderer) -> None:
    asked = [{"role": "user", "content": [image_url(png(300, 200)), text_part("What is it?")]}]
    async with serving(tmp_path, says("A cat."), vision_renderer) as server:
        counted = await server.ok("/s/v1/tokenize", {"messages": asked})
        reply = await server.chat(asked)
        assert reply["usage"]["prompt_tokens"] == counted["count"] == len(server.prompts()[0])
        assert counted["tokens"] == server.prompts()[0]


@pytest.mark.parametrize("path", ["/v1/generate", "/g/v1/generate"], ids=["without a session", "in a session"])
async def test_token_ids_and_image_data_come_over_http(tmp_path: Path, vision_renderer: Renderer, path: str) -> None:
    file = image_file(100, 80)
    ids = vision_renderer.render([Message(Role.USER, "Look.", images=(part(file, 5),))], (), {})
    body = {"input_ids": list(ids), "image_data": [data_url(file.data)], "sampling_params": {"max_new_tokens": 8}}
    async with serving(tmp_path, says("Red.", "x"), vision_renderer) as server:
        await server.ok(path, body)
        seen = server.engine.requests[0].images
        assert seen is not None
        assert [file.digest for file in await seen.read()] == [file.digest]
        assert seen.placed == vision_renderer.placed(ids, [Message(Role.USER, images=(part(file),))])
        refused = await server.post(path, {**body, "image_data": body["image_data"] * 2})
        assert refused.status_code == 400
        assert "the prompt has the tokens of 1 images, but 2 images came" in refused.text
        text_only = await server.post(path, {**body, "image_data": []})
        assert text_only.status_code == 400


async def test_a_session_with_images_is_refused_by_a_server_that_no_longer_sees(
    tmp_path: Path, vision_renderer: Renderer, vision_folder: Path
) -> None:
    asked: list[Any] = [{"role": "user", "content": [image_url(png(100, 80)), text_part("What is it?")]}]
    async with serving(tmp_path, says("A cat."), vision_renderer) as server:
        asked += [await server.answer(asked), user("Sure?")]
    missing = ConfigurationError("the package PIL is missing; pip install 'tokengrove[images]'")
    with mock.patch("proxy.vision.processor.load_processor", side_effect=missing):
        blind = load_renderer(Settings(), vision_folder)
    async with serving(tmp_path, says("Yes."), blind) as server:
        refused = await server.post("/s/v1/chat/completions", {"model": "m", "messages": asked})
        assert refused.status_code == 400
        session = await server.app.state.registry.get("s")
        [first] = session.complete()
        request = TurnRequest(Api.CHAT, "m", (*first.new_messages, first.output, Message(Role.USER, "Sure?")))
        with pytest.raises(InvalidRequest, match="images are refused: this server lacks what reading images needs"):
            await server.app.state.turns.begin(session, request, new_id=lambda: "turn")


async def test_a_new_turn_asks_the_processor_for_new_sizes_only_and_never_on_the_event_loop(
    tmp_path: Path, vision_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = load_renderer(Settings(), vision_folder)
    assert renderer.images is not None
    asked: list[tuple[tuple[int, int], bool]] = []
    expand = VisionProcessor._expanded

    def counted(self: VisionProcessor, size: tuple[int, int]) -> str:
        asked.append((size, threading.current_thread() is threading.main_thread()))
        return expand(self, size)

    monkeypatch.setattr(VisionProcessor, "_expanded", counted)
    sizes = [(100, 80), (100, 80), (200, 120), (100, 80), (200, 120)]
    async with serving(tmp_path, says(*map(str, range(5))), renderer) as server:
        asked.clear()  # of the example that is told at the start
        messages: list[Any] = []
        for number, size in enumerate(sizes):
            messages.append({"role": "user", "content": [image_url(png(*size, number)), text_part("Go on.")]})
            messages.append(await server.answer(messages))
        tree = await server.tree()
    assert asked == [((100, 80), False), ((200, 120), False)]
    assert [turn["reason"] for turn in tree] == ["first", *["continued"] * 4]
    assert all(turn["aligned"] for turn in tree[1:])


async def test_a_bridged_turn_renders_its_new_messages_only(
    tmp_path: Path, vision_renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the template writes does not grow with the images of the history."""
    written: list[int] = []
    assert vision_renderer.images is not None
    encode = vision_renderer.images.encode

    def counted(text: str, *more: Any) -> Ids:
        written.append(len(text))
        return encode(text, *more)

    monkeypatch.setattr(vision_renderer.images, "encode", counted)
    async with serving(tmp_path, says(*["Yes."] * 12), vision_renderer) as server:
        messages: list[Any] = []
        costs = []
        for number in range(12):
            written.clear()
            content = [image_url(png(64, 48, number)), text_part("Go on.")]
            messages.append({"role": "user", "content": content})
            messages.append(await server.answer(messages))
            costs.append(sum(written))
    assert len(set(costs[2:])) == 1


async def test_the_context_limit_counts_the_tokens_of_images(tmp_path: Path, vision_renderer: Renderer) -> None:
    asked = [{"role": "user", "content": [image_url(png(300, 200)), text_part("What is it?")]}]
    async with serving(tmp_path, says("A cat."), vision_renderer, max_context_tokens=60) as server:
        refused = await server.post("/s/v1/chat/completions", {"model": "m", "messages": asked})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_a_sampled_placeholder_is_never_taken_for_an_image(tmp_path: Path, vision_renderer: Renderer) -> None:
    """Engines ban it, but one of somebody's own may sample it: then it stays a token of the answer."""
    assert vision_renderer.images is not None
    pad = vision_renderer.images.token
    script = play([Reply(vision_renderer.encode("I <|image_pad|> see.<|im_end|>")), Reply(sampled("Yes."))] * 2)
    asked: list[Any] = [{"role": "user", "content": [image_url(png(100, 80)), text_part("What is it?")]}]
    async with serving(tmp_path, script, vision_renderer) as server:
        answer = await server.answer(asked)
        assert answer["content"] == "I <|image_pad|> see."
        more = {"role": "user", "content": [image_url(png(64, 48)), text_part("Sure?")]}
        await server.answer([*asked, answer, more])
        bridged = server.engine.requests[1]
        assert bridged.images is not None
        first, second = bridged.images.placed
        ids = bridged.input_ids
        inside = [*range(first.start, first.start + first.length), *range(second.start, second.start + second.length)]
        assert {ids[at] for at in inside} == {pad}
        assert ids.count(pad) == len(inside) + 1
        # Edited, the history is rendered anew, and the text of the answer is text.
        await server.answer([user("Before."), *asked, answer, more])
        anew = server.engine.requests[2]
        assert anew.images is not None
        assert anew.input_ids.count(pad) == sum(image.length for image in anew.images.placed) == len(inside)


async def test_a_history_that_is_rendered_in_full_has_its_images_where_they_stand_then(
    tmp_path: Path, vision_renderer: Renderer
) -> None:
    """A parent's tokens are not taken where one is outside of the vocabulary: before an image, places change."""
    outside = ids_of([*vision_renderer.encode("A cat. "), 1_000_000, *vision_renderer.encode("<|im_end|>")])
    asked: list[Any] = [{"role": "user", "content": [image_url(png(100, 80)), text_part("What is it?")]}]
    more = {"role": "user", "content": [text_part("And this?"), image_url(png(64, 48))]}
    async with serving(tmp_path, play([Reply(outside), Reply(sampled("A dog."))]), vision_renderer) as server:
        info = server.engine.info()
        server.engine._info = replace(info, vocab_size=1_000_001)  # of a larger model
        answer = await server.answer(asked)
        server.engine._info = info
        await server.answer([*asked, answer, more])
        full = server.engine.requests[1]
        assert vision_renderer.images is not None and full.images is not None
        pad = [at for at, token in enumerate(full.input_ids) if token == vision_renderer.images.token]
        assert pad == [at for image in full.images.placed for at in range(image.start, image.start + image.length)]
        stored = (await server.app.state.store.recordings.load_interactions("s"))[1]
        assert stored.images == full.images.placed and len(stored.images) == 2
        [*_, last] = await server.export(layout="individual")
        assert [(image["start"], image["length"]) for image in last["images"]] == [
            (image.start, image.length) for image in full.images.placed
        ]


async def test_known_ids_go_on_with_the_images_of_new_messages(tmp_path: Path, vision_renderer: Renderer) -> None:
    asked: list[Any] = [{"role": "user", "content": [image_url(png(100, 80)), text_part("What is it?")]}]
    new = {"role": "user", "content": [text_part("And "), image_url(png(300, 200)), text_part("?")]}
    async with serving(tmp_path, says("A cat."), vision_renderer) as server:
        known = (await server.ok("/v1/tokenize", {"messages": asked}))["tokens"]
        ids = known + list(sampled("A cat."))
        body = {
            "messages": [*asked, {"role": "assistant", "content": "A cat."}, new],
            "continue_from": {"messages": 2, "token_ids": ids, "output_tokens": len(sampled("A cat."))},
        }
        found = (await server.ok("/v1/tokenize", body))["tokens"]
        whole = (await server.ok("/v1/tokenize", {"messages": body["messages"]}))["tokens"]
        assert found == whole


async def test_all_choices_of_a_reply_have_the_images(tmp_path: Path, vision_renderer: Renderer) -> None:
    asked = [{"role": "user", "content": [image_url(png(100, 80)), text_part("What is it?")]}]
    async with serving(tmp_path, says("A cat.", "A dog."), vision_renderer) as server:
        await server.chat(asked, n=2)
        session = await server.app.state.registry.get("s")
        one, two = session.complete()
        assert one.images == two.images
        assert [request.images is not None for request in server.engine.requests] == [True, True]


async def test_a_text_that_is_no_chat_cannot_spell_an_image(tmp_path: Path, vision_renderer: Renderer) -> None:
    async with serving(tmp_path, says("A cat."), vision_renderer) as server:
        refused = await server.post("/s/v1/completions", {"model": "m", "prompt": "What is <|image_pad|>?"})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "prompt"
        assert error["message"] == "the prompt has more tokens of images than the 0 images that came take"
