"""A server whose logprobs are not the trainer's is named: in the answer, in the metrics and in the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.app import build_app
from proxy.settings import Settings
from tests.engines.pools import wires
from tests.engines.wire import LiveWire
from tests.logs import fields_of
from tests.support import JSON, Server, default_url, says, serving, tiny_renderer, user
from tokengrove.client import AsyncClient


@asynccontextmanager
async def pool(folder: Path, *live: LiveWire) -> AsyncIterator[Server]:
    settings = Settings(engine=",".join(wire.url for wire in live), database_url=default_url(folder), migrate=True)
    app = build_app(settings, renderer=tiny_renderer())
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://t", headers=JSON)
    async with app.router.lifespan_context(app), client as http:
        yield Server(app, http, app.state.engine)


async def gauge(server: Server, name: str) -> dict[str, float]:
    """The values of a gauge by engine server."""
    text = (await server.http.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.labels["server"]: sample.value for sample in samples if sample.name == name}


async def test_turns_tell_what_sampled_them(tmp_path: Path) -> None:
    async with wires(2) as live:
        live[0].wire.deterministic = {**live[0].wire.deterministic, "dtype": "bfloat16"}
        live[1].wire.deterministic = {**live[1].wire.deterministic, "dtype": "auto", "quantization": "fp8"}
        async with pool(tmp_path, *live) as server:
            for at in range(6):
                await server.chat([user(f"{at} hello")], f"s{at}", max_tokens=4)
            notes = [(await server.tree(f"s{at}"))[0]["notes"]["sampled_by"] for at in range(6)]
            assert {each["server"] for (each,) in notes} == {wire.url for wire in live}
            for (told,) in notes:
                bad = told["server"] == live[1].url
                assert told == {
                    "start": 0,
                    "server": told["server"],
                    **({"quantization": "fp8"} if bad else {"dtype": "bfloat16"}),
                }


async def test_a_turn_that_another_server_continues_tells_of_both(tmp_path: Path) -> None:
    async with wires(2, delay_s=0.05) as live, pool(tmp_path, *live) as server:
        body = {"messages": [user("a")], "max_tokens": 60, "ignore_eos": True, "stream": True}
        reply = asyncio.create_task(server.post("/s/v1/chat/completions", body))
        while not await sampled(server) and not reply.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # nothing tells of the tokens of a running turn
        servers = (await server.http.get("/engine/servers")).json()["servers"]
        busy = next(each["url"] for each in servers if each["in_flight"])
        lost, other = sorted(live, key=lambda wire: wire.url != busy)
        await lost.kill()
        assert (await reply).status_code == 200
        (turn,) = await server.tree()
        first, second = turn["notes"]["sampled_by"]
        assert (first, second["server"]) == ({"start": 0, "server": lost.url}, other.url)
        assert 0 < second["start"] < turn["output_tokens"]
        await lost.start()


async def sampled(server: Server) -> int:
    """The number of tokens that the running turn of session `s` has."""
    shown = (await server.http.get("/rl/sessions/s?include=running")).json()
    return sum(each.get("output_tokens") or 0 for each in shown.get("running", ()))


async def test_one_of_two_servers_with_other_logprobs_is_named_within_200_turns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    async with wires(2) as live, pool(tmp_path, *live) as server, AsyncClient(app=server.app) as client:
        bad = live[1].url
        for at in range(100):
            await server.chat([user(f"{at} hello")], f"s{at}", max_tokens=8)
            await server.ok(f"/s{at}/rl/end_session", {})
            (sample,) = (await client.export(session_id=f"s{at}")).samples
            (turn,) = await server.tree(f"s{at}")
            off = 0.3 if turn["notes"]["sampled_by"][0]["server"] == bad else 0.01
            trained = sample.logprobs + rng.normal(0, off, len(sample.logprobs)).astype(np.float32)
            await client.annotate([sample], at // 10, {"logprobs": [trained]})
        found = await client.mismatch()
        assert [each["server"] for each in found["named"]] == [bad]
        by_server = {each["server"]: each for each in found["samplers"]}
        assert by_server.keys() == {wire.url for wire in live}
        assert sum(each["turns"] for each in found["samplers"]) == 100
        assert by_server[bad]["kl"] == pytest.approx(0.3**2 / 2, rel=0.3)
        assert await gauge(server, "tokengrove_mismatch_named") == {live[0].url: 0.0, bad: 1.0}
        kl = await gauge(server, "tokengrove_mismatch_kl")
        assert kl[bad] > 0.02 > 0.001 > kl[live[0].url]
        assert (await gauge(server, "tokengrove_mismatch_largest_ratio"))[bad] == pytest.approx(
            by_server[bad]["largest_ratio"]
        )
        (line,) = fields_of(caplog, "sampler and trainer disagree")
        assert (line["server"], line["trainer"], "dtype" in line) == (bad, "trainer", False)
        early = await client.mismatch(first_step=0, last_step=3)
        assert sum(each["turns"] for each in early["samplers"]) == 40


async def test_a_turn_is_counted_once_however_often_it_is_told_of(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, says(*["one"] * 30), mismatch_limit=1e-9) as server,
        AsyncClient(app=server.app) as client,
    ):
        for at in range(15):
            await server.chat([user("a")], f"s{at}")
            await server.ok(f"/s{at}/rl/end_session", {})
            samples = (await client.export(session_id=f"s{at}")).samples
            for _ in range(3):
                await client.annotate(samples, 0, {"logprobs": [each.logprobs - 0.5 for each in samples]})
            await client.annotate(samples, 0, {"is_masked": [each.logprobs * 0 for each in samples]})
        assert (await client.mismatch())["named"] == [], "15 turns are too few"
