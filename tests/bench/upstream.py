"""A simulated engine server that costs next to nothing: it answers at once, at a rate, or part by part on request.

Run `python -m tests.bench.upstream PORT TOKENS` as a process of its own; `TOKENS` are the ids of its replies, separated
by commas. It answers POST /generate as SGLang does with `--incremental-streaming-output`, and POST
/v1/chat/completions as an OpenAI-compatible server. Every reply has as many tokens as its request allows. POST /pace
sets a `Pace` for streams that begin later; until then they come as fast as they are read."""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import uvloop

from proxy.engine.create import model_folder
from proxy.settings import Settings
from tests.bench.servers import Server, free_port, server_process

CONTEXT = 1_000_000
WORD = " word"
PROMPT_TOKENS = 600
"""Of a chat completion: what 2,500 characters have."""

_CHAT = {"id": "chatcmpl-simulated", "created": 1, "model": "bench"}
_FACTS: dict[str, Any] = {
    "/model_info": {"model_path": "simulated", "weight_version": "1"},
    "/server_info": {
        "version": "0.0",
        "incremental_streaming_output": True,
        "enable_deterministic_inference": True,
        "max_req_input_len": CONTEXT,
    },
    "/v1/models": {"object": "list", "data": [{"id": "bench", "object": "model", "max_model_len": CONTEXT}]},
    "/health": {},
}
_WORD_TOKEN = re.compile(" [a-z]+")
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Pace:
    """How streams are sent.

    `part_tokens`: tokens of a part; None as the request's `stream_interval` says. `rate`: tokens a second of each
    stream; None at once. `stepped`: a further `step_parts` parts at each POST /step.
    """

    part_tokens: int | None = None
    rate: float | None = None
    stepped: bool = False
    step_parts: int = 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Tokens:
    """The tokens of all replies, with the JSON of their logprobs."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = [b"%d" % token for token in ids]
        self._logprobs = [b"[%.4f,%d,null]" % (-0.5 - index / 128, token) for index, token in enumerate(ids)]

    def sglang(self, start: int, end: int, most: int, prompt_tokens: int) -> bytes:
        """Return tokens `start` to `end` of a reply of `most` tokens, as SGLang reports them."""
        places = [index % len(self._ids) for index in range(start, end)]
        finish = b'{"type":"length","length":%d}' % most if end == most else b"null"
        return (
            b'{"text":"","output_ids":[%s],"meta_info":{"id":"simulated","finish_reason":%s,"prompt_tokens":%d,'
            b'"weight_version":"1","completion_tokens":%d,"cached_tokens":0,"output_token_logprobs":[%s]}}'
        ) % (
            b",".join([self._ids[place] for place in places]),
            finish,
            prompt_tokens,
            end,
            b",".join([self._logprobs[place] for place in places]),
        )


def chat_chunk(start: int, end: int, most: int) -> bytes:
    """Return tokens `start` to `end` of a reply of `most` tokens as a chunk of a chat completion."""
    delta = {"role": "assistant", "content": WORD * (end - start)}
    choice = {"index": 0, "delta": delta, "finish_reason": _finish(end == most)}
    return orjson.dumps({**_CHAT, "object": "chat.completion.chunk", "choices": [choice]})


@cache
def chat_reply(most: int) -> bytes:
    """Return a reply of `most` tokens as a chat completion."""
    message = {"role": "assistant", "content": WORD * most}
    choice = {"index": 0, "message": message, "finish_reason": _finish(True)}
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": most, "total_tokens": PROMPT_TOKENS + most}
    return orjson.dumps({**_CHAT, "object": "chat.completion", "choices": [choice], "usage": usage})


def _finish(last: bool) -> str | None:
    return "length" if last else None


@dataclass(slots=True)
class Stream:
    """One streamed reply. `part(start, end, most)`: the JSON of these tokens. `begun_s`: when the first was sent."""

    part: Callable[[int, int, int], bytes]
    most: int
    interval: int
    seed: int
    begun_s: float = 0.0
    sent: int = 0

    def chunk(self) -> bytes:
        """Return the next tokens as one chunk of the body. The first part has one token, as SGLang sends it."""
        end = min(self.sent + (self.interval if self.sent else 1), self.most)
        data = b"data: %s\n\n" % self.part(self.sent, end, self.most)
        self.sent = end
        return b"%x\r\n%s\r\n" % (len(data), data) + (_END if end == self.most else b"")

    def chunks(self) -> Iterator[bytes]:
        while self.sent < self.most:
            yield self.chunk()


class Upstream:
    """What all connections share. `sent`: by seed of the request, when each part was sent (ns) and up to which token.

    `waiting`: streams that send on at each step.
    """

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.pace = Pace()
        self.waiting: dict[Exchange, Stream] = {}
        self.sent: dict[int, list[tuple[int, int]]] = {}

    def step(self) -> None:
        for exchange, stream in list(self.waiting.items()):
            exchange.write(b"".join(islice(stream.chunks(), self.pace.step_parts)))
            if stream.sent == stream.most:
                del self.waiting[exchange]

    def reports(self) -> bytes:
        """Return `sent` as JSON, and forget it."""
        sent, self.sent = self.sent, {}
        return orjson.dumps(sent, option=orjson.OPT_NON_STR_KEYS)


class Exchange(asyncio.Protocol):
    """One connection: HTTP/1.1, one request at a time."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._received = bytearray()
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._upstream.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if len(body) >= length:
            self._received = bytearray(body[length:])
            self._answer(head.split(b" ", 2)[1].decode(), bytes(body[:length]))

    def _answer(self, path: str, content: bytes) -> None:
        match path:
            case "/generate":
                self._generate(orjson.loads(content))
            case "/v1/chat/completions":
                self._chat(orjson.loads(content))
            case "/step":
                self._upstream.step()
                self._whole(b"{}")
            case "/pace":
                self._upstream.pace = Pace(**orjson.loads(content))
                self._whole(b"{}")
            case "/sent":
                self._whole(self._upstream.reports())
            case _:
                self._whole(orjson.dumps(_FACTS.get(path, {})), b"200 OK" if path in _FACTS else b"404 Not Found")

    def _generate(self, body: dict[str, Any]) -> None:
        sampling, prompt_tokens, tokens = body["sampling_params"], len(body["input_ids"]), self._upstream.tokens
        most = sampling["max_new_tokens"]
        if not body["stream"]:
            return self._whole(tokens.sglang(0, most, most, prompt_tokens))

        def part(start: int, end: int, most: int) -> bytes:
            return tokens.sglang(start, end, most, prompt_tokens)

        interval = self._upstream.pace.part_tokens or sampling.get("stream_interval") or 1
        self._begin(Stream(part, most, interval, sampling.get("sampling_seed", -1)))

    def _chat(self, body: dict[str, Any]) -> None:
        most = body.get("max_tokens") or body["max_completion_tokens"]
        if not body.get("stream"):
            return self._whole(chat_reply(most))
        self._begin(Stream(chat_chunk, most, self._upstream.pace.part_tokens or 1, body.get("seed") or -1))

    def _begin(self, stream: Stream) -> None:
        pace = self._upstream.pace
        self.write(_STREAM_HEAD)
        if pace.stepped:
            self.write(stream.chunk())
            if stream.sent < stream.most:
                self._upstream.waiting[self] = stream
        elif pace.rate is None:
            self.write(b"".join(stream.chunks()))
        else:
            stream.begun_s = asyncio.get_running_loop().time()
            self._send_on(stream, pace.rate)

    def _send_on(self, stream: Stream, rate: float) -> None:
        """Send a part, and the next one when its last token is due."""
        self.write(stream.chunk())
        self._upstream.sent.setdefault(stream.seed, []).append((time.monotonic_ns(), stream.sent))
        if stream.sent < stream.most:
            due_s = stream.begun_s + (min(stream.sent + stream.interval, stream.most) - 1) / rate
            self._timer = asyncio.get_running_loop().call_at(due_s, self._send_on, stream, rate)

    def _whole(self, content: bytes, status: bytes = b"200 OK") -> None:
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.write(head % (status, len(content)) + content)


def word_tokens(folder: Path, count: int = 64) -> list[int]:
    """Return tokens of a tokenizer that are each a space and a lower-case word, so each is a text of its own."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = range(tokenizer.get_vocab_size())
    words = (token for token in vocabulary if _WORD_TOKEN.fullmatch(tokenizer.decode([token])))
    return list(islice(words, count))


def model_of(tokenizer: Path | None) -> Path:
    """Return the folder of the tokenizer that the proxy uses."""
    return tokenizer or model_folder(Settings())


def upstream_server(folder: Path, tokens: list[int]) -> AbstractContextManager[Server]:
    """Run a simulated engine server in a process of its own. Its output goes to a file in `folder`."""
    port = free_port()
    arguments = ["-m", "tests.bench.upstream", str(port), ",".join(map(str, tokens))]
    return server_process(arguments, port, folder, core=1)


async def _serve(port: int, upstream: Upstream) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Exchange(upstream), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("tokens", type=lambda text: [int(token) for token in text.split(",")])
    options = parser.parse_args()
    uvloop.run(_serve(options.port, Upstream(Tokens(options.tokens))))


if __name__ == "__main__":
    main()
