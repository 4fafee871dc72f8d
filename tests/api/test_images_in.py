"""Images in requests of all three APIs: where they stand, what is stored of them, and what is refused by name."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.api.bodies import INLINE
from proxy.engine.interface import Capability
from proxy.images import intake
from proxy.images.decode import digest_of
from proxy.rendering.renderer import Renderer
from tests.support import Server, assistant, function_tool, says, serving, system, tool_result, user
from tests.vision import data_url, image_url, png, text_part

CHAT, RESPONSES, MESSAGES = "/s/v1/chat/completions", "/s/v1/responses", "/s/v1/messages"
ONE, TWO = png(seed=1), png(width=96, height=64, seed=2)
LOOK = function_tool("look")


@pytest.fixture
async def server(tmp_path: Path, vision_renderer: Renderer) -> AsyncIterator[Server]:
    async with serving(tmp_path, says(*["fine"] * 12), vision_renderer) as running:
        yield running


def block(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": b64encode(data).decode()}}


def item(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(data), **more}


def of_chat(*content: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": "m", "messages": [{"role": "user", "content": list(content)}]}


def of_responses(*content: Any) -> tuple[str, dict[str, Any]]:
    return RESPONSES, {"model": "m", "input": [{"role": "user", "content": list(content)}]}


def of_messages(*content: Any) -> tuple[str, dict[str, Any]]:
    return MESSAGES, {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": list(content)}]}


async def engine_images(server: Server) -> list[bytes]:
    """The images that came with the latest request to the engine."""
    images = server.engine.requests[-1].images
    return [] if images is None else [file.data for file in await images.read()]


async def stored_message(server: Server, index: int = -1) -> Any:
    turns = await server.tree()
    shown = await server.http.get(f"/rl/sessions/s/interactions/{turns[-1]['id']}?include=messages")
    return shown.raise_for_status().json()["messages"][index]


async def refused(server: Server, path: str, body: Any) -> str:
    """Send what is refused; return the message, which has no bytes of images."""
    answer = await server.post(path, body)
    assert answer.status_code == 400, answer.text
    assert "iVBOR" not in answer.text
    message: str = answer.json()["error"]["message"]
    return message


async def test_all_three_apis_give_the_same_prompt_and_the_same_images(server: Server) -> None:
    await server.ok(*of_chat(text_part("a "), image_url(ONE), text_part(" b"), image_url(TWO)))
    chat_prompt = server.prompts()[-1]
    assert await engine_images(server) == [ONE, TWO]
    text = {"type": "input_text", "text": "a "}
    await server.ok(*of_responses(text, item(ONE), {"type": "input_text", "text": " b"}, item(TWO)))
    assert server.prompts()[-1] == chat_prompt
    await server.ok(*of_messages(text_part("a "), block(ONE), text_part(" b"), block(TWO)))
    assert server.prompts()[-1] == chat_prompt
    assert await engine_images(server) == [ONE, TWO]


async def test_images_stand_where_the_client_put_them(server: Server) -> None:
    await server.ok(*of_chat(image_url(ONE), text_part("after"), image_url(TWO, detail="low"), text_part("end")))
    message = await stored_message(server, -1)
    assert message["content"] == "afterend"
    assert [{name: value for name, value in image.items() if name != "tokens"} for image in message["images"]] == [
        {"digest": digest_of(ONE), "at": 0, "width": 64, "height": 48},
        {"digest": digest_of(TWO), "at": 5, "width": 96, "height": 64, "detail": "low"},
    ]


@pytest.mark.parametrize(("given", "kept"), [("auto", None), ("low", "low"), ("high", "high"), ("original", "high")])
async def test_the_detail_is_kept(server: Server, given: str, kept: str | None) -> None:
    await server.ok(*of_responses(item(ONE, detail=given)))
    assert (await stored_message(server, -1))["images"][0].get("detail") == kept


async def test_tool_results_have_images_on_all_three_apis(server: Server) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    result = tool_result("c", "") | {"content": [text_part("seen: "), image_url(ONE)]}
    await server.chat([user("q"), assistant("", tool_calls=calls), result], tools=[LOOK])
    chat_prompt, chat_images = server.prompts()[-1], await engine_images(server)
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c"}
    output["output"] = [{"type": "input_text", "text": "seen: "}, item(ONE)]  # type: ignore[assignment]
    tool = {"type": "function", **LOOK["function"]}
    await server.ok(
        RESPONSES, {"model": "m", "tools": [tool], "input": [{"role": "user", "content": "q"}, call, output]}
    )
    assert (server.prompts()[-1], await engine_images(server)) == (chat_prompt, chat_images) and chat_images == [ONE]
    used = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    answered = {"type": "tool_result", "tool_use_id": "c", "content": [text_part("seen: "), block(ONE)]}
    turns = [user("q"), {"role": "assistant", "content": [used]}, {"role": "user", "content": [answered]}]
    shape = {"name": "look", "description": LOOK["function"]["description"]}
    tools = [{**shape, "input_schema": LOOK["function"]["parameters"]}]
    await server.ok(MESSAGES, {"model": "m", "max_tokens": 9, "tools": tools, "messages": turns})
    assert (server.prompts()[-1], await engine_images(server)) == (chat_prompt, [ONE])


async def test_a_screenshot_of_a_computer_call_is_the_result_of_a_call_of_a_function_computer(server: Server) -> None:
    action = {"type": "click", "x": 1, "y": 2}
    call = {"type": "computer_call", "id": "cu_1", "call_id": "c", "action": action, "status": "completed"}
    output = {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}}
    output["output"]["image_url"] = data_url(ONE)  # type: ignore[index]
    reply = await server.post(RESPONSES, {"model": "m", "input": [{"role": "user", "content": "q"}, call, output]})
    assert reply.status_code == 200, reply.text
    assert "computer" not in reply.headers.get("x-tokengrove-ignored", "")
    assert await engine_images(server) == [ONE]
    said, seen = await stored_message(server, -2), await stored_message(server, -1)
    assert said["tool_calls"][0]["function"] == {"name": "computer", "arguments": '{"type":"click","x":1,"y":2}'}
    assert (seen["role"], seen["tool_call_id"], seen["images"][0]["digest"]) == ("tool", "c", digest_of(ONE))


async def test_images_that_the_session_has_stored_come_without_their_bytes_and_reach_the_engine(server: Server) -> None:
    first = [{"role": "user", "content": [image_url(ONE)]}]
    await server.chat(first)
    assert server.engine.requests[-1].images is not None
    grown = [*first, assistant("fine"), {"role": "user", "content": [text_part("and "), image_url(TWO)]}]
    await server.chat(grown)
    assert await engine_images(server) == [ONE, TWO]
    assert [turn["reason"] for turn in await server.tree()] == ["first", "continued"]


async def test_a_text_that_is_known_is_not_read_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = intake.read_image

    def counted(data: bytes, name: str, **more: Any) -> Any:
        read.append(name)
        return real(data, name, **more)

    monkeypatch.setattr(intake, "read_image", counted)
    decoded: list[str] = []
    decode = intake.decode_text
    monkeypatch.setattr(intake, "decode_text", lambda *given: decoded.append(given[1]) or decode(*given))
    messages = [{"role": "user", "content": [image_url(ONE), image_url(ONE)]}]
    await server.chat(messages)
    assert (len(read), len(decoded)) == (1, 1)
    await server.chat([*messages, assistant("fine"), user("more")])
    assert (len(read), len(decoded)) == (1, 1)
    await server.chat(messages, session="another")
    assert (len(read), len(decoded)) == (1, 2)
    assert await engine_images(server) == [ONE, ONE]


async def test_an_image_of_a_turn_that_failed_is_not_lost(tmp_path: Path, vision_renderer: Renderer) -> None:
    limits = {"limits": {"max_context_tokens": 8}}
    async with serving(tmp_path, says("fine"), vision_renderer) as server:
        await server.ok("/rl/start_session", {"task_id": "t", "session_id": "short", **limits})
        messages = [{"role": "user", "content": [image_url(ONE)]}]
        answer = await server.post("/short/v1/chat/completions", {"model": "m", "messages": messages})
        assert answer.status_code == 400, answer.text
        await server.chat(messages)
        assert await engine_images(server) == [ONE]


async def test_a_long_history_with_images_is_parsed_from_its_new_messages_on(server: Server) -> None:
    messages: list[Any] = []
    for turn in range(40):
        messages += [{"role": "user", "content": [text_part(str(turn)), image_url(png(seed=turn))]}, assistant("ok")]
    messages.append(user("now"))
    await server.chat(messages)
    once = server.prompts()[-1]
    await server.chat(messages, session="new")
    assert server.prompts()[-1] == once
    changed = [{"role": "user", "content": [text_part("0"), image_url(png(seed=99))]}, *messages[1:]]
    await server.chat(changed)
    assert (await engine_images(server))[0] == png(seed=99)
    assert len(await engine_images(server)) == 40


async def test_the_same_picture_as_other_bytes_is_another_image(server: Server) -> None:
    await server.chat([{"role": "user", "content": [image_url(ONE)]}])
    trailing = ONE + b"\0"
    await server.chat([{"role": "user", "content": [image_url(trailing)]}, assistant("fine"), user("more")])
    assert await engine_images(server) == [trailing]


async def test_the_counted_tokens_are_those_of_the_turn(server: Server) -> None:
    path, body = of_messages(text_part("a "), block(ONE), block(TWO))
    counted = await server.ok(f"{MESSAGES}/count_tokens", {**body, "max_tokens": None})
    await server.ok(path, body)
    assert counted["input_tokens"] == len(server.prompts()[-1])
    path, body = of_responses(item(ONE), item(png(seed=77), detail="low"))
    counted = await server.ok(f"{RESPONSES}/input_tokens", body)
    await server.ok(path, body)
    assert counted["input_tokens"] == len(server.prompts()[-1])
    path, body = of_chat(text_part("a"), image_url(TWO))
    tokens = await server.ok("/s/v1/tokenize", body)
    await server.ok(path, body)
    assert tokens["tokens"] == server.prompts()[-1]


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_a_written_request_gives_the_same_prompt_and_images_elsewhere(server: Server, api: str) -> None:
    content = {
        "chat": (of_chat, (text_part("a"), image_url(ONE, detail="low"), text_part("b"))),
        "responses": (of_responses, ({"type": "input_text", "text": "a"}, item(ONE, detail="high"), item(TWO))),
        "messages": (of_messages, (block(TWO), text_part("a"), block(ONE))),
    }
    make, parts = content[api]
    await server.ok(*make(*parts))
    prompt, images = server.prompts()[-1], await engine_images(server)
    turn = (await server.tree())[0]["id"]
    shown = (await server.http.get(f"/rl/sessions/s/interactions/{turn}?include=request")).json()["request"]
    assert (shown["lacks"], shown["same_elsewhere"]) == ([], True)
    await server.ok(shown["path"].replace("/s/", "/elsewhere/"), shown["body"])
    assert (server.prompts()[-1], await engine_images(server)) == (prompt, images)


async def test_a_written_request_has_images_of_tool_results(server: Server) -> None:
    used = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    answered = {"type": "tool_result", "tool_use_id": "c", "content": [block(ONE)]}
    turns = [
        user("q"),
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [answered, text_part("and"), block(TWO)]},
    ]
    await server.ok(MESSAGES, {"model": "m", "max_tokens": 9, "messages": turns})
    turn = (await server.tree())[0]["id"]
    shown = (await server.http.get(f"/rl/sessions/s/interactions/{turn}?include=request")).json()["request"]
    assert shown["lacks"] == []
    assert shown["body"]["messages"][2]["content"][0]["content"] == [block(ONE)]
    assert shown["body"]["messages"][2]["content"][1:] == [text_part("and"), block(TWO)]


async def test_token_ids_come_with_the_images_whose_tokens_they_have(server: Server) -> None:
    await server.ok(*of_chat(text_part("a"), image_url(ONE)))
    prompt = server.prompts()[-1]
    for image in (data_url(ONE), b64encode(ONE).decode()):
        await server.ok("/g/v1/generate", {"input_ids": prompt, "image_data": image})
        assert (server.prompts()[-1], await engine_images(server)) == (prompt, [ONE])
    turn = (await server.tree("g"))[-1]["id"]
    shown = (await server.http.get(f"/rl/sessions/g/interactions/{turn}?include=request")).json()["request"]
    assert shown["body"]["image_data"] == [data_url(ONE)]
    assert await refused(server, "/g/v1/generate", {"input_ids": prompt, "image_data": 3}) == (
        "'image_data' must be a list of base64 texts or URLs, not a number"
    )


@pytest.mark.parametrize(
    ("make", "part", "says_so"),
    [
        (of_chat, {"type": "image_url"}, "'messages[0].content[0].image_url' must be an object"),
        (of_chat, {"type": "image_url", "image_url": {"url": 3}}, "image_url.url' must be a string"),
        (of_chat, image_url(ONE, detail="best"), "image_url.detail' must be one of auto, low, high, original"),
        (of_chat, {"type": "input_audio"}, "has type 'input_audio'; beside text this server takes images"),
        (of_chat, block(ONE), "this API sends as parts of type 'image_url'"),
        (of_responses, {"type": "input_image", "file_id": "f"}, "'input[0].content[0].file_id' is not supported"),
        (of_responses, {"type": "input_image", "image_url": None}, "image_url' must be a string"),
        (of_responses, {"type": "input_file", "file_id": "f"}, "has type 'input_file'"),
        (of_messages, {"type": "image"}, "source' must be an object"),
        (of_messages, {"type": "image", "source": {"type": "file", "file_id": "f"}}, "keeps no files"),
        (of_messages, {"type": "image", "source": {"type": "x"}}, "source.type' must be base64 or url"),
        (of_messages, {"type": "document", "source": {}}, "of a 'document' is not supported"),
    ],
)
async def test_what_is_no_image_part_is_refused_by_its_path(server: Server, make: Any, part: Any, says_so: str) -> None:
    assert says_so in await refused(server, *make(part))


async def test_answers_have_no_images_in_apis_that_have_no_such_answers(server: Server) -> None:
    path, body = of_messages(text_part("q"))
    body["messages"] += [{"role": "assistant", "content": [block(ONE)]}, user("more")]
    assert "only messages from the user, and tool results" in await refused(server, path, body)
    body["system"] = [block(ONE)]
    body["messages"] = [user("q")]
    assert "'system[0]'" in await refused(server, path, body)
    path, body = of_responses({"type": "input_text", "text": "q"})
    body["input"].append({"role": "assistant", "content": [item(ONE)]})
    assert "answers and reasoning are texts" in await refused(server, path, body)


async def test_a_prefill_with_an_image_is_refused(server: Server) -> None:
    path, body = of_chat(text_part("q"))
    body["messages"].append({"role": "assistant", "content": [text_part("a"), image_url(ONE)]})
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    assert "has an image, so it cannot be continued" in await refused(server, path, body)


async def test_the_number_of_images_of_a_request_is_limited(tmp_path: Path, vision_renderer: Renderer) -> None:
    async with serving(tmp_path, says("a"), vision_renderer, max_request_images=2) as server:
        await server.ok(*of_chat(image_url(ONE), image_url(ONE)))
        said = await refused(server, *of_chat(*[image_url(ONE)] * 3))
    assert "'messages[0].content[2].image_url.url' is image 3 of the request" in said
    assert "--max-request-images" in said


@pytest.mark.parametrize("make", [of_chat, of_responses, of_messages])
async def test_a_model_without_vision_refuses_images_by_name(tmp_path: Path, make: Any) -> None:
    parts = {of_chat: image_url(ONE), of_responses: item(ONE), of_messages: block(ONE)}
    async with serving(tmp_path, says("a")) as server:
        said = await refused(
            server, *make(text_part("a") | ({"type": "input_text"} if make is of_responses else {}), parts[make])
        )
        assert "content[1]" in said
        assert "accepts text only" in said
        said = await refused(server, "/v1/generate", {"input_ids": [1], "image_data": [data_url(ONE)]})
        assert said == "'image_data' is not supported: this model accepts text only"


async def test_screenshots_of_a_computer_are_refused_where_the_model_sees_none(tmp_path: Path) -> None:
    output = {"type": "computer_screenshot", "image_url": data_url(ONE)}
    action = {"type": "screenshot"}
    items = [{"role": "user", "content": "q"}, {"type": "computer_call", "call_id": "c", "action": action}]
    items.append({"type": "computer_call_output", "call_id": "c", "output": output})  # type: ignore[dict-item]
    async with serving(tmp_path, says("a")) as server:
        reply = await server.post(RESPONSES, {"model": "m", "input": items})
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == "'input[2].output' is a screenshot; this model accepts text only"


async def shown_messages(server: Server) -> Any:
    turn = (await server.tree())[-1]["id"]
    shown = await server.http.get(f"/rl/sessions/s/interactions/{turn}?include=messages")
    return shown.raise_for_status().json()["messages"]


async def test_a_system_message_with_an_image_goes_where_the_template_puts_it(server: Server) -> None:
    await server.chat([system("") | {"content": [text_part("see "), image_url(ONE)]}, user("q")])
    assert await engine_images(server) == [ONE]


async def test_no_bytes_of_images_are_logged(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    await server.ok(*of_chat(text_part("a"), image_url(ONE)))
    await refused(server, *of_chat(image_url(ONE[:40])))
    assert caplog.records
    assert b64encode(ONE).decode()[:24] not in caplog.text


async def test_an_engine_that_takes_no_images_refuses_them_by_name(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = server.engine.info()
    lacking = replace(info, capabilities=info.capabilities - {Capability.IMAGES})
    monkeypatch.setattr(server.app.state.turns.routes.main.gate, "info", lambda: lacking)
    said = await refused(server, *of_chat(text_part("a"), image_url(ONE)))
    assert said == (
        "'messages[0].content[1].image_url.url' is an image, and the engine 'scripted' takes none for this model; "
        "send text only"
    )
    await server.ok(*of_chat(text_part("a")))


async def test_a_server_that_lacks_what_images_need_refuses_them_without_naming_its_files(
    server: Server, vision_renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_renderer, "blind", "the model in /secret/folder: the package PIL is missing")
    said = await refused(server, *of_chat(image_url(ONE)))
    assert "its log says what" in said
    assert "secret" not in said


@pytest.mark.parametrize("make", [of_chat, of_responses, of_messages])
async def test_large_bodies_are_read_as_small_ones(server: Server, make: Any) -> None:
    parts = {of_chat: image_url, of_responses: item, of_messages: block}
    large = [ONE + bytes(INLINE), TWO + bytes(9000)]
    text = text_part("see ") if make is not of_responses else {"type": "input_text", "text": "see "}
    path, body = make(text, *(parts[make](data) for data in large))
    for _ in range(2):
        await server.ok(path, body)
        assert await engine_images(server) == large


async def test_large_bodies_of_token_ids_are_read_as_small_ones(server: Server) -> None:
    large = ONE + bytes(INLINE)
    path, body = of_chat(text_part("a"), image_url(large))
    tokens = (await server.ok("/v1/tokenize", body))["tokens"]
    await server.ok(path, body)
    assert server.prompts()[-1] == tokens
    for image in (data_url(large), [b64encode(large).decode()]):
        await server.ok("/g/v1/generate", {"input_ids": tokens, "image_data": image})
        assert (server.prompts()[-1], await engine_images(server)) == (tokens, [large])


async def test_completions_have_no_messages_and_so_no_images(server: Server) -> None:
    _, body = of_chat(image_url(ONE))
    await server.ok("/s/v1/completions", {**body, "prompt": "a", "max_tokens": 4})
    assert await engine_images(server) == []


async def test_an_error_in_a_large_body_is_at_its_place_in_what_was_sent(server: Server) -> None:
    body = orjson.dumps({"messages": [{"role": "user", "content": [image_url(bytes(INLINE))]}]})[:-1] + b";"
    answer = await server.http.post("/s/v1/chat/completions", content=body)
    assert answer.status_code == 400 and f"column {len(body)}" in answer.json()["error"]["message"]


async def test_a_large_body_that_is_no_object_is_refused(server: Server) -> None:
    url = data_url(ONE + bytes(INLINE))
    for body in ([url], url, [{"messages": [url]}]):
        assert "must be an object" in (await refused(server, CHAT, body)).replace("a JSON object", "an object")


async def test_a_data_url_that_is_a_text_stays_one_in_a_large_body(server: Server) -> None:
    quoted = data_url(ONE + bytes(6000))
    await server.ok(*of_chat(text_part(quoted), image_url(TWO + bytes(INLINE))))
    assert (await stored_message(server))["content"] == quoted
    assert await engine_images(server) == [TWO + bytes(INLINE)]
