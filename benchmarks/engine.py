"""A fake engine server with the wires of SGLang and vLLM, and a log of every id that it received and sampled.

Run `python -m benchmarks.engine MODEL_FOLDER PORT`. The newest message of a prompt must end with a line
`[turn SESSION.TURN say]` or `[turn SESSION.TURN call TOOL]`, which the engine follows as a model would; any text may
stand before it. Other prompts, as servers send to see whether an engine works, are answered and not logged. Answers
have exactly as many tokens as the request allows, with awkward ids (`benchmarks.sampling`).

- POST /generate, as SGLang 0.5: ids in; ids and logprobs out, whole or streamed.
- POST /v1/chat/completions and /v1/completions, as vLLM 0.11 and later, with `return_token_ids` and `logprobs`; without
  these fields, as any OpenAI-compatible server.
- POST /tokenize, as vLLM.
- POST /bench/pace `{"rate": tokens a second of a stream or null, "part": tokens}`. GET /bench/log returns the answers
  since the last call, and forgets their times but not their ids.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import uvloop
from aiohttp import web

from benchmarks.model import CONTEXT, IMAGE, IMAGE_TOKENS, Model
from benchmarks.sampling import Answer, Sampler
from benchmarks.scoring import digest

LARGEST_BODY = 256 * 2**20
LOGPROB = -0.5
NAME = "bench"
_DIRECTIVE = re.compile(r"\[turn (\d+)\.(\d+) (say|call) ?(\w*)\]")
_TAIL = 64
"""Tokens at the end of a prompt in which the directive is looked for."""


@dataclass(slots=True)
class Logged:
    """An answer. Times are of the monotonic clock, in ns, which all processes of a machine share.

    `parts`: when each part was sent, and how many tokens and characters had been sent with it.
    """

    session: int
    turn: int
    attempt: int
    prompt: array[int]
    answer: Answer
    began: int
    ended: int = 0
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    continues: tuple[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "session": self.session,
            "turn": self.turn,
            "attempt": self.attempt,
            "prompt": digest(self.prompt),
            "prompt_tokens": len(self.prompt),
            "sampled": self.answer.ids,
            "content": self.answer.content,
            "began": self.began,
            "ended": self.ended,
            "parts": self.parts,
            "continues": self.continues,
        }


class Engine:
    """The state of the engine."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.sampler = Sampler(model)
        self.rate: float | None = None
        self.part = 1
        self._new: list[Logged] = []
        self._sessions: dict[int, list[tuple[array[int], tuple[int, int]]]] = {}
        self._attempts: dict[tuple[int, int], int] = {}

    def begin(self, began: int, prompt: list[int], tokens: int) -> Logged:
        """Sample an answer and log it. A prompt without a directive is a probe: its answer is not logged.

        `began`: when the request arrived. Raises web.HTTPBadRequest for too few tokens.
        """
        found = _DIRECTIVE.findall(self.model.decode(prompt[-_TAIL:]))
        if not found:
            return Logged(-1, 0, 0, array("i", prompt), self.sampler.probe(tokens), began)
        session, turn, _, tool = found[-1]
        key = int(session), int(turn)
        attempt = self._attempts[key] = self._attempts.get(key, -1) + 1
        try:
            answer = self.sampler.answer(f"{session}.{turn}.{attempt}", tokens, tool or None)
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        logged = Logged(*key, attempt, array("i", prompt), answer, began)
        logged.continues = self._continued(logged)
        self._new.append(logged)
        return logged

    def _continued(self, logged: Logged) -> tuple[int, int] | None:
        """Return the turn and attempt whose prompt and answer this prompt begins with; of several the longest."""
        earlier = self._sessions.setdefault(logged.session, [])
        best: tuple[int, tuple[int, int]] | None = None
        for ids, key in earlier:
            if (best is None or len(ids) > best[0]) and logged.prompt[: len(ids)] == ids:
                best = len(ids), key
        earlier.append((logged.prompt + array("i", logged.answer.ids), (logged.turn, logged.attempt)))
        return best[1] if best else None

    def take_log(self) -> list[dict[str, Any]]:
        taken, self._new = [one for one in self._new if one.ended], [one for one in self._new if not one.ended]
        return [one.to_json() for one in taken]

    async def parts(self, logged: Logged, part: int) -> AsyncIterator[tuple[int, int]]:
        """Yield the tokens of each part, from and to, when it is due."""
        total, sent = len(logged.answer.ids), 0
        while sent < total:
            end = min(sent + part, total)
            if self.rate is not None:
                await asyncio.sleep(max(0.0, logged.began / 1e9 + end / self.rate - time.monotonic()))
            yield sent, end
            sent = end

    async def whole(self, logged: Logged) -> None:
        """Wait until a whole answer is due."""
        if self.rate is not None:
            await asyncio.sleep(len(logged.answer.ids) / self.rate)
        logged.ended = time.monotonic_ns()


Encode = Callable[[int, int], dict[str, Any]]


class Wires:
    """The handlers of the engine's paths."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._model = engine, engine.model
        self._image = engine.model.id_of(IMAGE)

    def routes(self) -> list[web.RouteDef]:
        facts: dict[str, dict[str, Any]] = {
            "/model_info": {
                "model_path": str(self._model.folder),
                "weight_version": "1",
                "has_image_understanding": True,
            },
            "/server_info": {"version": "0.5.9", "incremental_streaming_output": True, "max_req_input_len": CONTEXT},
            "/v1/models": {"object": "list", "data": [{"id": NAME, "object": "model", "max_model_len": CONTEXT}]},
            "/health": {},
            "/health_generate": {},
        }
        facts["/get_model_info"], facts["/get_server_info"] = facts["/model_info"], facts["/server_info"]

        def told(answer: dict[str, Any]) -> Callable[[web.Request], Any]:
            async def tell(_: web.Request) -> web.Response:
                return _json(answer)

            return tell

        return [
            *[web.get(path, told(answer)) for path, answer in facts.items()],
            *[web.post(path, told({})) for path in ("/abort_request", "/pause_generation", "/continue_generation")],
            web.post("/generate", self.generate),
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
            web.post("/tokenize", self.tokenize),
            web.post("/bench/pace", self.pace),
            web.get("/bench/log", self.log),
        ]

    async def pace(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        self._engine.rate, self._engine.part = body["rate"], body["part"]
        return _json({})

    async def log(self, _: web.Request) -> web.Response:
        return _json(self._engine.take_log())

    async def tokenize(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        ids = self._render(body) if "messages" in body else self._model.encode(body["prompt"])
        return _json({"tokens": ids, "count": len(ids), "max_model_len": CONTEXT})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        began = time.monotonic_ns()
        body = orjson.loads(await request.read())
        sampling = body["sampling_params"]
        prompt = self._with_images(body["input_ids"]) if body.get("image_data") else body["input_ids"]
        logged = self._engine.begin(began, prompt, sampling["max_new_tokens"])
        ids, total = logged.answer.ids, len(logged.answer.ids)

        def encode(start: int, end: int) -> dict[str, Any]:
            finish = {"type": "stop", "matched": ids[-1]} if end == total else None
            logprobs = [[LOGPROB, token, None] for token in ids[start:end]]
            meta = {
                **{"id": body.get("rid", "bench"), "finish_reason": finish, "prompt_tokens": len(prompt)},
                **{"weight_version": "1", "completion_tokens": end, "cached_tokens": 0},
                "output_token_logprobs": logprobs,
            }
            told = {"prompt_token_ids": prompt} if body.get("return_prompt_token_ids") else {}
            return {"text": self._model.decode(ids[start:end]), "output_ids": ids[start:end], "meta_info": meta, **told}

        if not body.get("stream"):
            await self._engine.whole(logged)
            return _json(encode(0, total))
        return await self._stream(request, logged, encode, sampling.get("stream_interval"))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        began = time.monotonic_ns()
        body = orjson.loads(await request.read())
        prompt = self._render(body)
        logged = self._engine.begin(began, prompt, _most(body))
        return await self._answer(request, body, logged, _Chat(self._model, body, logged))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        began = time.monotonic_ns()
        body = orjson.loads(await request.read())
        prompt = body["prompt"] if isinstance(body["prompt"], list) else self._model.encode(body["prompt"])
        logged = self._engine.begin(began, prompt, _most(body))
        return await self._answer(request, body, logged, _Completion(self._model, body, logged))

    def _render(self, body: dict[str, Any]) -> list[int]:
        return self._with_images(self._model.render(body["messages"], body.get("tools")))

    def _with_images(self, ids: list[int]) -> list[int]:
        """Return the ids with the tokens of each image in place of its one placeholder."""
        if self._image not in ids:
            return ids
        return [token for one in ids for token in ([one] * IMAGE_TOKENS if one == self._image else [one])]

    async def _answer(
        self, request: web.Request, body: dict[str, Any], logged: Logged, reply: _Reply
    ) -> web.StreamResponse:
        if not body.get("stream"):
            await self._engine.whole(logged)
            return _json(reply.whole())
        usage = (body.get("stream_options") or {}).get("include_usage")
        return await self._stream(request, logged, reply.part, None, reply.usage if usage else None)

    async def _stream(
        self,
        request: web.Request,
        logged: Logged,
        encode: Encode,
        interval: int | None,
        last: Callable[[], dict[str, Any]] | None = None,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        characters = 0
        async for start, end in self._engine.parts(logged, max(self._engine.part, interval or 1)):
            part = encode(start, end)
            characters += len(self._model.decode(logged.answer.ids[start:end], special=False))
            logged.parts.append((time.monotonic_ns(), end, characters))
            await response.write(b"data: %s\n\n" % orjson.dumps(part))
        logged.ended = time.monotonic_ns()
        if last is not None:
            await response.write(b"data: %s\n\n" % orjson.dumps(last()))
        await response.write(b"data: [DONE]\n\n")
        return response


class _Reply:
    """A completion in vLLM's form. `part` has the tokens from `start` to `end`."""

    object = ""

    def __init__(self, model: Model, body: dict[str, Any], logged: Logged) -> None:
        self.model, self.logged = model, logged
        self.ids, self.answer = logged.answer.ids, logged.answer
        self.total = len(self.ids)
        self.says_ids = bool(body.get("return_token_ids"))
        self.says_logprobs = body.get("logprobs") not in (None, False)
        tag = f"{logged.session}-{logged.turn}-{logged.attempt}"
        self.head = {"id": f"chatcmpl-{tag}", "created": int(time.time()), "model": body.get("model", NAME)}

    def part(self, start: int, end: int) -> dict[str, Any]:
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        raise NotImplementedError

    def usage(self) -> dict[str, Any]:
        return {**self.head, "object": f"{self.object}.chunk", "choices": [], **self._usage()}

    def _usage(self) -> dict[str, Any]:
        prompt = len(self.logged.prompt)
        counts = {"prompt_tokens": prompt, "completion_tokens": self.total, "total_tokens": prompt + self.total}
        return {"usage": counts}

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.logged.prompt)} if self.says_ids else {}

    def _told(self, start: int, end: int) -> dict[str, Any]:
        return {"token_ids": self.ids[start:end]} if self.says_ids else {}


class _Chat(_Reply):
    object = "chat.completion"

    def __init__(self, model: Model, body: dict[str, Any], logged: Logged) -> None:
        super().__init__(model, body, logged)
        self._content = len(self.answer.content)
        self._said = 0
        self._role: dict[str, str] = {"role": "assistant"}

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.answer.content}
        if (call := self._call()) is not None:
            message["tool_calls"] = [call]
        choice = {"index": 0, "message": message, **self._logprobs(0, self.total), "finish_reason": self._finish()}
        choice |= self._told(0, self.total)
        return {**self.head, "object": self.object, "choices": [choice], **self._usage(), **self._prompt()}

    def part(self, start: int, end: int) -> dict[str, Any]:
        text = self.model.decode(self.ids[start:end], special=False)
        shown = text[: max(0, self._content - self._said)]
        self._said += len(text)
        last = end == self.total
        delta: dict[str, Any] = {**self._role, "content": shown}
        self._role = {}
        if last and (call := self._call()) is not None:
            delta["tool_calls"] = [{"index": 0, **call}]
        choice = {"index": 0, "delta": delta, **self._logprobs(start, end)}
        choice |= {"finish_reason": self._finish() if last else None, **self._told(start, end)}
        first = self._prompt() if start == 0 else {}
        return {**self.head, "object": "chat.completion.chunk", "choices": [choice], **first}

    def _finish(self) -> str:
        return "stop" if self.answer.call is None else "tool_calls"

    def _call(self) -> dict[str, Any] | None:
        if self.answer.call is None:
            return None
        name, query = self.answer.call
        arguments = orjson.dumps({"query": query}).decode()
        tag = f"call-{self.logged.session}-{self.logged.turn}-{self.logged.attempt}"
        return {"id": tag, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _logprobs(self, start: int, end: int) -> dict[str, Any]:
        if not self.says_logprobs:
            return {"logprobs": None}
        entries = []
        for token in self.ids[start:end]:
            text = self.model.decode([token])
            entries.append({"token": text, "logprob": LOGPROB, "bytes": list(text.encode()), "top_logprobs": []})
        return {"logprobs": {"content": entries}}


class _Completion(_Reply):
    object = "text_completion"

    def whole(self) -> dict[str, Any]:
        return {**self.part(0, self.total), **self._usage()}

    def part(self, start: int, end: int) -> dict[str, Any]:
        ids = self.ids[start:end]
        choice: dict[str, Any] = {"index": 0, "text": self.model.decode(ids, special=False), **self._told(start, end)}
        if self.says_logprobs:
            tokens = [f"token_id:{token}" for token in ids]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": [LOGPROB] * len(ids), "top_logprobs": None}
        choice["finish_reason"] = "stop" if end == self.total else None
        if start == 0:
            choice |= self._prompt()
        return {**self.head, "object": self.object, "choices": [choice]}


def _most(body: dict[str, Any]) -> int:
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    if not isinstance(most, int):
        raise web.HTTPBadRequest(text="max_tokens is missing: answers have as many tokens as it says")
    return most


def _json(content: Any) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type="application/json")


def application(model: Model) -> web.Application:
    """Return the engine as an application of aiohttp."""
    app = web.Application(client_max_size=LARGEST_BODY)
    app.add_routes(Wires(Engine(model)).routes())
    return app


async def _serve(model: Model, port: int) -> None:
    runner = web.AppRunner(application(model), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("port", type=int)
    options = parser.parse_args()
    uvloop.run(_serve(Model(options.model), options.port))


if __name__ == "__main__":
    main()
