"""An engine server that answers anything at all: agents read a plain sentence, and nothing of what the engine said."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from proxy.app import build_app
from proxy.settings import Settings
from tests.engines.wire import LiveWire
from tests.logs import fields_of
from tests.support import JSON, Server, default_url, tiny_renderer, user
from tests.wide import CROSSED

MARK = "kiwi-4711"
"""What the engine says, and nobody else."""

META = {"id": "x", "finish_reason": None, "prompt_tokens": None, "weight_version": "0", "completion_tokens": 1}


def sglang(logprob: Any = -0.5, **meta: Any) -> dict[str, Any]:
    told = {**META, "output_token_logprobs": [[logprob, 5, None]], **meta}
    return {"text": MARK, "output_ids": [5], "meta_info": told}


def vllm(logprob: Any = -0.5, **choice: Any) -> dict[str, Any]:
    told = {"index": 0, "text": MARK, "token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": logprob}]}}
    return {"id": "x", "choices": [{**told, "finish_reason": None, **choice}]}


NAN = "a logprob is NaN"
HOSTILE: list[tuple[str, Any, str]] = [
    ("sglang", sglang(float("nan")), NAN),
    ("sglang", sglang(float("-inf")), "a logprob is infinite"),
    ("sglang", sglang(MARK), "without its logprob"),
    ("sglang", sglang(completion_tokens=MARK), "SGLang's form"),
    ("sglang", sglang(completion_tokens=float("nan")), "SGLang's form"),
    ("sglang", sglang(prompt_tokens=MARK), "continued a prompt"),
    ("sglang", sglang(cached_tokens=MARK), "SGLang's form"),
    ("sglang", sglang(finish_reason={"type": "abort", "status_code": 500, "message": MARK}), "the engine failed"),
    ("sglang", sglang(finish_reason={"type": "abort", "status_code": 400, "message": MARK}), "the engine refused"),
    ("sglang", {"error": {"message": MARK, "code": 500}}, "the engine failed"),
    ("sglang", {"error": {"message": MARK, "code": 400}}, "the engine refused"),
    ("sglang", {"error": MARK}, "the engine refused"),
    ("sglang", MARK, "instead of an object"),
    ("sglang", f"{{{MARK}".encode(), "not JSON"),
    ("sglang", f"{{NaN {MARK}".encode(), "not JSON"),
    ("vllm", vllm(float("nan")), NAN),
    ("vllm", vllm(float("inf")), "a logprob is infinite"),
    ("vllm", vllm(MARK), "vLLM's form"),
    ("vllm", vllm(token_ids=[MARK]), "or those of others"),
    ("vllm", vllm(finish_reason=MARK), "a reason that vLLM does not have"),
    ("vllm", {"error": {"message": MARK, "code": 500}}, "the engine failed"),
    ("vllm", {"error": {"message": MARK, "code": 400}}, "the engine refused"),
    ("vllm", {"error": MARK}, "the engine refused"),
    ("vllm", MARK, "instead of an object"),
    ("vllm", f"{{{MARK}".encode(), "not JSON"),
]


class HostileWire(LiveWire):
    """Answers generations with `said`, once it is set, as a stream of events or whole, with `status`."""

    said: Any = None
    status = 200

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if self.said is None or scope["path"] not in ("/generate", "/inference/v1/generate"):
            await super()._answer(scope, receive, send)
            return
        asked = b""
        while True:
            message = await receive()
            asked += message.get("body", b"")
            if not message.get("more_body"):
                break
        said = self.said if isinstance(self.said, bytes) else json.dumps(self.said).encode()
        streamed = json.loads(asked)["stream"] and self.status == 200
        body = b"data: %b\n\ndata: [DONE]\n\n" % said if streamed else said
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@pytest_asyncio.fixture
async def hostile(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Server, HostileWire]]:
    wire = HostileWire(request.param)
    await wire.start()
    settings = Settings(engine=wire.url, database_url=default_url(tmp_path), migrate=True, pause_timeout_s=0.1)
    app = build_app(settings, renderer=tiny_renderer())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://t", headers=JSON)
    try:
        async with app.router.lifespan_context(app), client as http:
            yield Server(app, http, app.state.engine), wire
    finally:
        await wire.kill()


async def answers(server: Server) -> list[httpx.Response]:
    """Of a turn in one piece, of a streamed one, and of a loop's own generation."""
    body = {"model": "m", "max_tokens": 9, "messages": [user("hi")]}
    return [
        await server.post("/s/v1/chat/completions", body),
        await server.post("/s/v1/messages", {**body, "stream": True}),
        await server.post("/s/v1/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 9}}),
    ]


@pytest.mark.parametrize(("hostile", "said", "named"), HOSTILE, indirect=["hostile"])
async def test_agents_read_what_is_wrong_and_nothing_of_the_answer(
    hostile: tuple[Server, HostileWire], said: Any, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    server, wire = hostile
    wire.said = said
    for answer in await answers(server):
        assert named in answer.text and MARK not in answer.text
    tree = await server.tree()
    assert [turn["status"] for turn in tree] == ["failed"] * len(tree) and len(tree) >= 2
    assert all(turn["error"] for turn in fields_of(caplog, "turn"))


@CROSSED
@pytest.mark.parametrize("status", [400, 404, 422, 500])
@pytest.mark.parametrize("hostile", ["sglang", "vllm"], indirect=True)
async def test_agents_read_nothing_of_a_refusal(hostile: tuple[Server, HostileWire], status: int) -> None:
    server, wire = hostile
    wire.said, wire.status = {"error": {"message": MARK}}, status
    for answer in await answers(server):
        assert answer.status_code != 200 or "error" in answer.text
        assert MARK not in answer.text
