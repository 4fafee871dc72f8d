"""A simulated SGLang server that costs next to nothing: it answers at once, at a rate, or part by part on request.

Run `python -m tests.bench.upstream PORT TOKENS [--stepped]` as a process of its own; `TOKENS` are the
ids of its replies, separated by commas. Every reply has as many tokens as its request allows. Replies are sent as
SGLang sends them with `--incremental-streaming-output`; `stream_interval` is honoured until
POST /part/TOKENS/PARTS, which sets the tokens of a part and the parts of a step."""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import uvloop

from tests.bench.servers import Server, free_port, server_process

CONTEXT = 1_000_000
_FACTS: dict[str, Any] = {
    "/model_info": {"model_path": "simulated", "weight_version": "1"},
    "/server_info": {
        "version": "0.0",
        "incremental_streaming_output": True,
        "enable_deterministic_inference": True,
        "max_req_input_len": CONTEXT,
    },
    "/v1/models": {"data": [{"id": "simulated", "max_model_len": CONTEXT}]},
    "/health": {},
}
_WORD = re.compile(" [a-z]+")
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Tokens:
    """The tokens of all replies, with the JSON of their logprobs."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids
        self._logprobs = [[-0.5 - index / 128, token, None] for index, token in enumerate(ids)]

    def part(self, start: int, end: int, most: int, prompt_tokens: int) -> bytes:
        """Return tokens `start` to `end` of a reply of `most` tokens, as SGLang reports them."""
        places = [index % len(self._ids) for index in range(start, end)]
        meta = {
            "id": "simulated",
            "finish_reason": {"type": "length", "length": most} if end == most else None,
            "prompt_tokens": prompt_tokens,
            "weight_version": "1",
            "completion_tokens": end,
            "cached_tokens": 0,
            "output_token_logprobs": [self._logprobs[place] for place in places],
        }
        return orjson.dumps({"text": "", "output_ids": [self._ids[place] for place in places], "meta_info": meta})


class Upstream:
    """What all connections share.

    `stepped`: a stream sends a further part at each POST /step. `part_tokens`: its size; None as requested.
    `step_parts`: parts that are sent in one step.
    """

    def __init__(self, tokens: Tokens, stepped: bool) -> None:
        self.tokens = tokens
        self.stepped = stepped
        self.part_tokens: int | None = None
        self.step_parts = 1
        self.waiting: dict[Exchange, Iterator[bytes]] = {}

    def parts(self, body: dict[str, Any]) -> Iterator[bytes]:
        """Yield the chunks of a streamed reply. The first has one token, as SGLang sends it."""
        sampling, prompt_tokens = body["sampling_params"], len(body["input_ids"])
        most = sampling["max_new_tokens"]
        size = self.part_tokens or sampling.get("stream_interval") or 1
        start, end = 0, 1 if self.part_tokens is None else min(size, most)
        while start < most:
            data = b"data: %s\n\n" % self.tokens.part(start, end, most, prompt_tokens)
            yield b"%x\r\n%s\r\n" % (len(data), data) + (_END if end == most else b"")
            start, end = end, min(end + size, most)

    def step(self) -> None:
        for exchange, parts in list(self.waiting.items()):
            part = b"".join(islice(parts, self.step_parts))
            exchange.write(part)
            if part.endswith(_END):
                del self.waiting[exchange]


class Exchange(asyncio.Protocol):
    """One connection: HTTP/1.1, one request at a time."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._received = bytearray()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._upstream.waiting.pop(self, None)

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
        if path == "/generate":
            self._generate(orjson.loads(content))
        elif path == "/step":
            self._upstream.step()
            self._whole(b"{}")
        elif path.startswith("/part/"):
            self._upstream.part_tokens, self._upstream.step_parts = map(int, path.split("/")[2:])
            self._whole(b"{}")
        else:
            self._whole(orjson.dumps(_FACTS.get(path, {})), b"200 OK" if path in _FACTS else b"404 Not Found")

    def _generate(self, body: dict[str, Any]) -> None:
        if not body["stream"]:
            most = body["sampling_params"]["max_new_tokens"]
            self._whole(self._upstream.tokens.part(0, most, most, len(body["input_ids"])))
            return
        parts = self._upstream.parts(body)
        if self._upstream.stepped:
            first = next(parts)
            if not first.endswith(_END):
                self._upstream.waiting[self] = parts
            self.write(_STREAM_HEAD + first)
        else:
            self.write(_STREAM_HEAD + b"".join(parts))

    def _whole(self, content: bytes, status: bytes = b"200 OK") -> None:
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.write(head % (status, len(content)) + content)


def word_tokens(folder: Path, count: int = 64) -> list[int]:
    """Return tokens of a tokenizer that are each a space and a lower-case word, so each is a text of its own."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = range(tokenizer.get_vocab_size())
    return [token for token in vocabulary if _WORD.fullmatch(tokenizer.decode([token]))][:count]


def upstream_server(folder: Path, tokens: list[int], *options: str) -> AbstractContextManager[Server]:
    """Run a simulated engine server in a process of its own. Its output goes to a file in `folder`."""
    port = free_port()
    arguments = ["-m", "tests.bench.upstream", str(port), ",".join(map(str, tokens)), *options]
    return server_process(arguments, port, folder, core=1)


async def _serve(port: int, upstream: Upstream) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Exchange(upstream), "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("tokens", type=lambda text: [int(token) for token in text.split(",")])
    parser.add_argument("--stepped", action="store_true", help="a further part of every stream at each POST /step")
    options = parser.parse_args()
    uvloop.run(_serve(options.port, Upstream(Tokens(options.tokens), options.stepped)))


if __name__ == "__main__":
    main()
