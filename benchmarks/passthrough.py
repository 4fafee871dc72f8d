"""A bare handler that forwards bytes to the engine: the least that a gateway in Python costs.

Run `python -m benchmarks.passthrough ENGINE_URL PORT`.
"""

from __future__ import annotations

import argparse
import asyncio

import aiohttp
import uvloop
from aiohttp import web

from benchmarks.engine import LARGEST_BODY


async def _serve(engine: str, port: int) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False, read_bufsize=2**20) as http:

        async def forward(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {"content-type": "application/json"}
            async with http.post(f"{engine}/v1/chat/completions", data=body, headers=headers) as upstream:
                if upstream.headers.get("transfer-encoding") != "chunked":
                    return web.Response(
                        body=await upstream.read(), status=upstream.status, content_type=upstream.content_type
                    )
                response = web.StreamResponse(status=upstream.status, headers={"content-type": upstream.content_type})
                await response.prepare(request)
                async for part in upstream.content.iter_any():
                    await response.write(part)
                return response

        async def health(_: web.Request) -> web.Response:
            return web.Response()

        app = web.Application(client_max_size=LARGEST_BODY)
        app.add_routes([web.post("/v1/chat/completions", forward), web.get("/health", health)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("port", type=int)
    options = parser.parse_args()
    uvloop.run(_serve(options.engine, options.port))


if __name__ == "__main__":
    main()
