"""Google's generateContent on a whole server: its addresses, keys, streams, retries, errors and rebuilt requests."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from proxy.engine.scripted.scripts import Fault, Reply, play
from proxy.images.decode import digest_of
from proxy.rendering.renderer import Renderer
from tests.logs import lines_of
from tests.support import Server, assistant, call_text, function_tool, sampled, says, serving, tool_result, user
from tests.vision import data_url, image_url, png, text_part
from tokengrove.spans import Tracing

MODEL = "/v1beta/models/org/m"
ADD = function_tool("add", {"a": {"type": "integer"}})
DECLARED = {
    "name": "add",
    "description": "does add",
    "parameters": {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}, "required": ["a"]},
}
TOOLS = [{"functionDeclarations": [DECLARED]}]
THINKS = "<think>\nwhy\n</think>\n\nText." + call_text("add", '{"a":  1}')
SHOWN = {"thinkingConfig": {"includeThoughts": True}}
ADMIN = {"authorization": "Bearer admin"}
CANARY = "canary-key-1234567890"


def content(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "parts": [{"text": text}]}


def result(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "parts": [{"functionResponse": {"name": "add", "response": {"result": text}, **more}}]}


def asks(*contents: Any, **more: Any) -> dict[str, Any]:
    return {"contents": list(contents) or [content("hi")], **more}


def answer_of(reply: Any) -> Any:
    return reply["candidates"][0]["content"]


def events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    return [json.loads(event.removeprefix("data: ")) for event in response.text.strip().split("\n\n")]


async def test_a_tool_loop_is_one_chain_of_exact_tokens_that_other_apis_continue(tmp_path: Path) -> None:
    async with serving(tmp_path, says(THINKS, "two", "three")) as server:
        more = {"tools": TOOLS, "generationConfig": SHOWN, "systemInstruction": content("S")}
        first = answer_of(await server.ok(f"/s{MODEL}:generateContent", asks(content("q"), **more)))
        assert [sorted(part) for part in first["parts"]] == [
            ["text", "thought"],
            ["text"],
            ["functionCall", "thoughtSignature"],
        ]
        history = [content("q"), first, result("2")]
        second = await server.post(f"/s{MODEL}:streamGenerateContent?alt=sse", asks(*history, **more))
        assert "".join(answer_of(chunk)["parts"][0]["text"] for chunk in events(second)) == "two"
        call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        messages = [user("q"), assistant("Text.", tool_calls=[call]), tool_result("x", "2"), assistant("two")]
        await server.chat([{"role": "system", "content": "S"}, *messages, user("more")], tools=[ADD])
        tree = await server.tree()
        assert [(node["api"], node["reason"], node["model"]) for node in tree] == [
            ("google", "first", "org/m"),
            ("google", "continued", "org/m"),
            ("chat", "continued", "m"),
        ]
        (sample,) = await server.export()
        assert sum(sample["loss_mask"]) == sum(node["output_tokens"] for node in tree)


async def test_of_equal_answers_the_one_whose_signature_is_echoed_is_continued(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["<think>\nhm\n</think>\n\nsame"] * 3, "next")) as server:
        replies = [await server.ok(f"/s{MODEL}:generateContent", asks()) for _ in range(3)]
        await server.ok(f"/s{MODEL}:generateContent", asks(content("hi"), answer_of(replies[1]), content("go on")))
        last = (await server.tree())[3]
        assert (last["reason"], last["parent_id"]) == ("continued", replies[1]["responseId"])


@pytest.mark.parametrize("version", ["/v1beta", "/v1alpha", "/v1", ""])
@pytest.mark.parametrize("session", ["", "/s", "/a/b"])
async def test_each_version_of_an_address_reaches_the_session(tmp_path: Path, version: str, session: str) -> None:
    async with serving(tmp_path, says("one", "two", "three")) as server:
        at = f"{session}{version}/models/org/m:7b"
        assert answer_of(await server.ok(f"{at}:generateContent", asks())) == content("one", "model")
        assert answer_of(events(await server.post(f"{at}:streamGenerateContent?alt=sse", asks()))[0])
        array = await server.ok(f"{at}:streamGenerateContent", asks())
        assert [chunk["modelVersion"] for chunk in array] == ["org/m:7b"] * len(array)
        assert (await server.ok(f"{at}:countTokens", asks()))["totalTokens"] > 1
        assert len(await server.tree(session.removeprefix("/") or "default")) == 3


async def test_a_count_is_the_number_of_prompt_tokens_of_the_turn(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one")) as server:
        body = asks(tools=TOOLS, systemInstruction=content("S"))
        counted = await server.ok(f"/s{MODEL}:countTokens", {"generateContentRequest": body})
        reply = await server.ok(f"/s{MODEL}:generateContent", body)
        assert counted == {"totalTokens": reply["usageMetadata"]["promptTokenCount"]}


async def test_models_are_listed_in_googles_form_for_its_clients(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), served_model_name="org/served") as server:
        for path, headers in (("/s/v1beta", {}), ("/s/v1", {"x-goog-api-key": "k"}), ("/v1beta", {})):
            (listed,) = (await server.http.get(f"{path}/models", headers=headers)).json()["models"]
            assert listed["name"] == "models/org/served" and "countTokens" in listed["supportedGenerationMethods"]
            shown = (await server.http.get(f"{path}/models/org/served", headers=headers)).json()
            assert shown == listed
        assert (await server.http.get("/s/v1/models")).json()["object"] == "list"


@pytest.mark.parametrize("path", [f"{MODEL}:generateContent", f"{MODEL}:streamGenerateContent?alt=sse"])
async def test_a_key_in_googles_header_or_in_the_query_is_the_key_of_its_session(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, says(*["x"] * 5), admin_key="admin") as server:
        started = await server.ok("/rl/start_session", {"session_id": "s", "api_key": CANARY}, headers=ADMIN)
        keyed = f"{path}{'&' if '?' in path else '?'}key={CANARY}"
        assert (await server.post(path, asks(), headers={"x-goog-api-key": CANARY})).status_code == 200
        assert (await server.post(keyed, asks())).status_code == 200
        assert (await server.post(f"/~{CANARY}{path}", asks())).status_code == 200
        assert (await server.post(started["root_url"] + path, asks())).status_code == 200
        refused = await server.post(keyed.replace(CANARY, "wrong"), asks())
        assert (refused.status_code, refused.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
        shown = await server.http.get("/rl/sessions/s", headers=ADMIN)
        assert len(shown.json()["interactions"]) == 4


async def test_only_googles_paths_take_a_key_from_the_query(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), admin_key="admin") as server:
        for path in ("/v1/chat/completions", "/v1/models/x/y", "/rl/sessions", "/rl/sessions/v1beta/models"):
            assert (await server.http.get(f"{path}?key=admin")).status_code != 200 or path.startswith("/v1/models")
        assert (await server.post("/trajectories/export?key=admin", {"session_id": "s"})).status_code == 401


async def test_a_key_in_the_query_is_in_no_line_span_answer_or_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr("proxy.app.start_tracing", lambda tell: Tracing(exporter))
    said: list[str] = []
    with caplog.at_level(logging.DEBUG):
        async with serving(tmp_path, play([Reply(sampled("x")), Reply(sampled("y"), fault=Fault.ERROR)])) as server:
            for method in ("generateContent", "generateContent", "countTokens", "embedContent"):
                for body in (asks(), {"contents": 3}):
                    answer = await server.post(f"{MODEL}:{method}?key={CANARY}", body)
                    said += [answer.text, str(answer.headers)]
            streamed = await server.post(f"{MODEL}:streamGenerateContent?alt=sse&key={CANARY}", asks())
            models = [await server.http.get(f"/v1beta/models{end}?key={CANARY}") for end in ("", "/m", "/m/../x")]
            said += [streamed.text, *(answer.text for answer in models)]
            listed = (await server.http.get("/rl/sessions")).text
            (session,) = [each["session_id"] for each in json.loads(listed)["sessions"]]
            shown = await server.http.get(f"/rl/sessions/{session}/interactions/0?include=request,reply,messages")
            said += [listed, shown.text, (await server.http.get("/metrics")).text]
    lines = [line for form in ("pretty", "json") for line in lines_of(caplog, logger="proxy", form=form)]
    said += [*lines, *(span.to_json() for span in exporter.get_finished_spans())]
    assert exporter.get_finished_spans() and "generateContent" in "".join(lines)
    assert not [text for text in said if CANARY in text]
    assert CANARY.encode() not in stored(tmp_path)


def stored(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.glob("test.db*"))


async def test_an_error_has_googles_envelope_and_names_the_field(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        refused = await server.post(f"/s{MODEL}:generateContent", asks(generationConfig={"topP": 3}))
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["status"]) == (400, 400, "INVALID_ARGUMENT")
        reason, violations = error["details"]
        assert reason["reason"] == "invalid_request"
        assert violations["fieldViolations"][0]["field"] == "generationConfig.topP"


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/s/v1/foo",
            "/sessions/s/v1/foo",
            "/s/v1beta/foo",
            "/s/v1beta/models/m:embedContent",
            "/rl/sessions/s/v1/foo",
        ),
        *("/s/v1/models/m:generate", "/v1beta/models/m", "/s/v1/models/m/chat/completion"),
    ],
)
async def test_an_unknown_path_below_a_session_is_a_404_that_names_the_apis(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, says()) as server:
        answer = await server.post(path, {})
        assert answer.status_code == 404
        message = answer.json()["error"]["message"]
        ends = ("/chat/completions", "/responses", "/messages", "/v1beta/models/MODEL:generateContent")
        assert [end for end in (path, *ends) if end not in message] == []


async def test_a_hosted_tool_is_named_in_the_header_of_ignored_fields(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one")) as server:
        body = asks(tools=[{"googleSearch": {}}, {"functionDeclarations": [DECLARED]}], safetySettings=[])
        answer = await server.post(f"/s{MODEL}:generateContent", body)
        assert answer.status_code == 200
        assert unquote(answer.headers["x-tokengrove-ignored"]) == "safetySettings,tools[0] of type googleSearch"
    (other := tmp_path / "other").mkdir()
    async with serving(other, says("one"), hosted_tools="refuse") as server:
        answer = await server.post(f"/s{MODEL}:generateContent", body)
        assert answer.status_code == 400 and "googleSearch" in answer.json()["error"]["message"]


async def test_a_marked_retry_replays_the_committed_answer(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        keyed = {"headers": {"idempotency-key": "k"}}
        first = await server.ok(f"/s{MODEL}:generateContent", asks(), **keyed)
        assert await server.ok(f"/s{MODEL}:generateContent", asks(), **keyed) == first
        chunks = events(await server.post(f"/s{MODEL}:streamGenerateContent?alt=sse", asks(), **keyed))
        assert {chunk["responseId"] for chunk in chunks} == {first["responseId"]}
        assert len(await server.tree()) == 1


async def test_a_stream_that_fails_ends_with_googles_error(tmp_path: Path) -> None:
    reply = Reply(sampled("one two three"), chunk=1, fault=Fault.ERROR, fault_after=2)
    async with serving(tmp_path, play([reply])) as server:
        answer = await server.post(f"/s{MODEL}:streamGenerateContent?alt=sse", asks())
        *before, last = answer.text.split("\n\n")
        assert answer.status_code == 200 and before and "finishReason" not in answer.text
        assert json.loads(last)["error"]["status"] in ("INTERNAL", "UNAVAILABLE")


async def test_candidates_logprobs_and_token_ids_are_those_that_were_sampled(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        config = {"candidateCount": 2, "responseLogprobs": True, "logprobs": 1}
        reply = await server.ok(f"/s{MODEL}:generateContent", asks(generationConfig=config, return_token_ids=True))
        tree = await server.tree()
        assert [each["index"] for each in reply["candidates"]] == [0, 1] and len(tree) == 2
        assert [len(each["tokenIds"]) for each in reply["candidates"]] == [node["output_tokens"] for node in tree]
        assert reply["promptTokenIds"] == server.prompts()[0]
        chosen = [token["token"] for token in reply["candidates"][0]["logprobsResult"]["chosenCandidates"]]
        assert "".join(chosen) == reply["candidates"][0]["content"]["parts"][0]["text"]


@pytest.mark.parametrize("method", ["generateContent", "streamGenerateContent?alt=sse"])
async def test_a_written_request_gives_the_same_prompt_and_its_reply_is_rebuilt(tmp_path: Path, method: str) -> None:
    call = call_text("add", '{"a": 1}')
    async with serving(tmp_path, says(f"<think>\nwhy\n</think>\n\nText.{call}", *[call] * 3)) as server:
        choice = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["add"]}}
        config = {**SHOWN, "temperature": 0.5, "topK": 7, "maxOutputTokens": 90, "stopSequences": ["END"]}
        config |= {"thinkingConfig": {"includeThoughts": True, "thinkingLevel": "LOW"}}
        more = {"tools": TOOLS, "generationConfig": config, "systemInstruction": content("S")}
        first = await server.ok(f"/s{MODEL}:generateContent", asks(content("q"), **more))
        history = asks(content("q"), answer_of(first), result("2"), toolConfig=choice, **more)
        sent = await server.post(f"/s{MODEL}:{method}", history)
        prompts = server.prompts()
        for index in (0, 1):
            shown = await server.http.get(f"/rl/sessions/s/interactions/{index}?include=request,reply")
            request = shown.json()["request"]
            assert request["lacks"] == []
            assert request["same_elsewhere"] or index > 0  # the text of a call may be written with other white space
            again = await server.post(request["path"], request["body"])
            assert again.status_code == 200 and server.prompts()[-1] == prompts[index]
        assert ("streamGenerateContent" in request["path"]) == ("stream" in method)
        shown = await server.http.get("/rl/sessions/s/interactions/0?include=reply")
        assert shown.json()["reply"] == first
        assert sent.status_code == 200


@pytest.fixture
async def seeing(tmp_path: Path, vision_renderer: Renderer) -> AsyncIterator[Server]:
    async with serving(tmp_path, says(*["fine"] * 4), vision_renderer) as running:
        yield running


ONE = png(seed=1)


def inline(data: bytes, **more: Any) -> dict[str, Any]:
    return {"inlineData": {"mimeType": "image/png", "data": data_url(data).partition(",")[2]}, **more}


async def test_images_give_the_prompt_that_they_give_in_the_chat_api(seeing: Server) -> None:
    await seeing.chat([{"role": "user", "content": [text_part("a "), image_url(ONE), text_part(" b")]}])
    parts = [{"text": "a "}, inline(ONE), {"text": " b"}]
    await seeing.ok(f"/g{MODEL}:generateContent", asks({"role": "user", "parts": parts}))
    snake = [parts[0], {"inline_data": {"mime_type": "image/png", "data": parts[1]["inlineData"]["data"]}}, parts[2]]
    await seeing.ok(f"/g{MODEL}:generateContent", asks({"role": "user", "parts": snake}))
    assert seeing.prompts()[0] == seeing.prompts()[1] == seeing.prompts()[2]
    shown = await seeing.http.get("/rl/sessions/g/interactions/0?include=request")
    request = shown.json()["request"]
    assert request["lacks"] == [] and request["body"]["contents"][0]["parts"] == parts


async def test_the_resolution_of_an_image_is_its_detail(seeing: Server) -> None:
    own = inline(ONE, mediaResolution={"level": "MEDIA_RESOLUTION_HIGH"})
    body = asks(
        {"role": "user", "parts": [own, inline(ONE)]}, generationConfig={"mediaResolution": "MEDIA_RESOLUTION_LOW"}
    )
    await seeing.ok(f"/s{MODEL}:generateContent", body)
    shown = await seeing.http.get("/rl/sessions/s/interactions/0?include=messages")
    images = shown.json()["messages"][0]["images"]
    assert [(image["digest"], image["detail"]) for image in images] == [
        (digest_of(ONE), "high"),
        (digest_of(ONE), "low"),
    ]


async def test_a_result_has_images(seeing: Server) -> None:
    call = {"role": "model", "parts": [{"functionCall": {"name": "add", "args": {}}}]}
    body = asks(content("q"), call, result("seen: ", parts=[inline(ONE)]), tools=TOOLS)
    await seeing.ok(f"/s{MODEL}:generateContent", body)
    shown = await seeing.http.get("/rl/sessions/s/interactions/0?include=messages")
    message = shown.json()["messages"][-1]
    assert (message["role"], message["content"], message["images"][0]["digest"]) == ("tool", "seen: ", digest_of(ONE))


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"inlineData": {"mimeType": "audio/mpeg", "data": "eA=="}}, "contents[0].parts[0].inlineData.mimeType"),
        ({"fileData": {"fileUri": "gs://bucket/a.png"}}, "contents[0].parts[0].fileData.fileUri"),
        (
            {"file_data": {"file_uri": "https://generativelanguage.googleapis.com/v1beta/files/1"}},
            "contents[0].parts[0].fileData.fileUri",
        ),
        (inline(ONE, mediaResolution={"level": "BIG"}), "contents[0].parts[0].inlineData.mediaResolution"),
    ],
)
async def test_other_media_and_files_of_google_are_refused_by_name(seeing: Server, part: Any, param: str) -> None:
    answer = await seeing.post(f"/s{MODEL}:generateContent", asks({"role": "user", "parts": [part]}))
    assert answer.status_code == 400
    assert answer.json()["error"]["details"][1]["fieldViolations"][0]["field"] == param
