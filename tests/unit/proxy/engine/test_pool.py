"""The pool over simulated SGLang servers: placement, deaths, returns, weight updates and pauses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from starlette.responses import Response

from proxy.engine import gate as gates
from proxy.engine.contract import complete
from proxy.engine.interface import PauseMode, WeightTransfer
from proxy.engine.servers import connection
from proxy.engine.servers.connection import Keys, ServerConnection, server_url
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.pool import Pool
from proxy.engine.servers.sglang_server import SglangServer
from proxy.types import ids_of
from tests.engines.gates import AdminGate
from tests.engines.pools import CHECK_S, OVER_BOTH, PROMPT, SELDOM_S, of_session, opener_of, pool_of, states, wires
from tests.engines.scripts import VOCABULARY, following
from tests.engines.wire import LiveWire
from tests.support import until
from tests.wide import first
from tokengrove.errors import ConfigurationError, EngineLost, EngineUnavailable, InvalidRequest


@OVER_BOTH
@pytest.mark.parametrize("seed", first(range(3)))
async def test_random_kills_and_restarts_change_no_token(seed: int, kind: str) -> None:
    rng = random.Random(seed)
    async with wires(3, delay_s=0.002, kind=kind) as live, pool_of(*(wire.url for wire in live)) as pool:
        gate = AdminGate(pool)
        prompts = [ids_of(rng.choices(range(600), k=rng.randint(1, 40))) for _ in range(24)]
        requests = [of_session(f"s{n % 7}", prompt, 60, stream=n % 2 == 0) for n, prompt in enumerate(prompts)]
        running = [asyncio.create_task(gate.read(request)) for request in requests]
        for _ in range(5):
            victim = rng.choice(live)
            await victim.kill()
            await asyncio.sleep(rng.random() * 0.03)
            await victim.start()
            await until(lambda url=victim.url: states(pool)[url] == "alive")
        replies = await asyncio.gather(*running)
        for prompt, reply in zip(prompts, replies, strict=True):
            assert reply.ids == following(prompt, 60)
        assert all(shown["in_flight"] == 0 for shown in pool.servers())


@pytest.mark.parametrize("stream", [True, False])
async def test_cutting_the_replies_of_a_hung_server_raises_engine_lost(stream: bool) -> None:
    async with wires(1, delay_s=3600.0) as (wire,):
        engine = SglangServer(wire.url, VOCABULARY)
        await engine.start()
        reading = asyncio.create_task(complete(engine, of_session("s", stream=stream)))
        await until(lambda: bool(wire.wire.engine.running))
        engine.cut()
        with pytest.raises(EngineLost):
            await reading
        assert await engine.check() == 0
        await engine.close()


@OVER_BOTH
@pytest.mark.wide
async def test_requests_of_a_hung_server_continue_elsewhere(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_PROBE_S", 1.0)
    async with wires(2, delay_s=0.01, kind=kind) as live, pool_of(*(wire.url for wire in live)) as pool:
        reading = asyncio.create_task(AdminGate(pool).read(of_session("s", stream=False)))
        await until(lambda: any(shown["in_flight"] for shown in pool.servers()))
        victim = next(w for w, shown in zip(live, pool.servers(), strict=True) if shown["in_flight"])
        victim.hung = True
        assert (await reading).ids == following(PROMPT, 40)
        assert states(pool)[victim.url] == "ejected"
        victim.hung = False
        await until(lambda: states(pool)[victim.url] == "alive")


@OVER_BOTH
async def test_requests_that_a_server_refuses_run_elsewhere(kind: str) -> None:
    async with wires(2, kind=kind) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        live[0].refuse_generate = True
        gate = AdminGate(pool)
        for number in range(8):
            assert (await gate.read(of_session(f"s{number}"))).ids == following(PROMPT, 40)
        assert {shown["state"] for shown in pool.servers()} == {"alive"}
        live[0].refuse_generate = False
        live[1].refuse_generate = True
        assert (await gate.read(of_session("s1"))).ids == following(PROMPT, 40)


async def test_no_token_of_a_restarted_server_has_its_initial_weights() -> None:
    async with wires(2, delay_s=0.001) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        gate = AdminGate(pool)
        await gate.admin.update_weights("/weights/5", 5, PauseMode.DRAIN)
        for wire in live:
            await gate.read(of_session("s", tokens=2))
            await wire.kill()
            await wire.start()
            reply = await gate.read(of_session("s", tokens=30))
            assert set(reply.versions) == {5} and len(reply.ids) == 30
            for member in pool._members:
                if not member.alive:
                    await pool._look_at(member)
        assert {wire.wire.version for wire in live} == {"5"}


async def test_a_server_that_joins_during_an_update_gets_the_newest_weights() -> None:
    async with wires(2) as live, pool_of(live[0].url) as pool:
        await pool.update_weights("/weights/1", 1)
        live[1].wire.before_update.clear()
        joining = asyncio.create_task(pool.add(live[1].url))
        await until(lambda: live[1].wire.updating)
        await pool.update_weights("/weights/2", 2)
        live[1].wire.before_update.set()
        await joining
        assert [wire.wire.version for wire in live] == ["2", "2"]
        assert {shown["version"] for shown in pool.servers()} == {2}


async def test_a_server_that_joins_while_a_pause_ends_is_not_left_paused() -> None:
    async with wires(2) as live, pool_of(live[0].url) as pool:
        await pool.update_weights("/weights/1", 1)
        await pool.pause(PauseMode.RETRACT)
        live[1].wire.before_update.clear()
        joining = asyncio.create_task(pool.add(live[1].url))
        await until(lambda: live[1].wire.updating)
        await pool.resume()
        live[1].wire.before_update.set()
        await joining
        replies = await asyncio.gather(*(complete(pool, of_session(f"s{n}")) for n in range(4)))
        assert all(reply.ids == following(PROMPT, 40) for reply in replies)
        assert all(shown["served"] == 2 for shown in pool.servers())


async def test_a_server_that_leaves_during_a_pause_finishes_its_requests() -> None:
    async with wires(2, delay_s=0.005) as live, pool_of(*(wire.url for wire in live)) as pool:
        gate = AdminGate(pool)
        reading = [asyncio.create_task(gate.read(of_session(f"s{n}"))) for n in range(2)]
        await until(lambda: all(shown["in_flight"] for shown in pool.servers()))
        await gate.admin.pause(PauseMode.RETRACT)
        await pool.remove(live[0].url)
        assert states(pool)[live[0].url] == "leaving"
        await gate.admin.resume()
        assert all(reply.ids == following(PROMPT, 40) for reply in await asyncio.gather(*reading))
        assert list(states(pool)) == [live[1].url]


async def test_a_leaving_server_can_be_added_back() -> None:
    async with wires(1, delay_s=0.005) as (wire,), pool_of(wire.url) as pool:
        reading = asyncio.create_task(complete(pool, of_session("s")))
        await until(lambda: bool(pool.servers()[0]["in_flight"]))
        await pool.remove(wire.url + "/")
        await pool.add(wire.url + "/v1")
        await reading
        assert states(pool) == {wire.url: "alive"}


async def test_a_server_that_cannot_load_the_weights_is_ejected_and_its_requests_continue() -> None:
    async with wires(2, delay_s=0.005) as live, pool_of(*(wire.url for wire in live)) as pool:
        gate = AdminGate(pool)
        reading = [asyncio.create_task(gate.read(of_session(f"s{n}", tokens=80))) for n in range(4)]
        await until(lambda: all(shown["in_flight"] for shown in pool.servers()))
        live[0].forget("/update_weights_from_disk")
        assert await gate.admin.update_weights("/weights/3", 3, PauseMode.RETRACT) == 3
        assert all(reply.ids == following(PROMPT, 80) for reply in await asyncio.gather(*reading))
        assert states(pool) == {live[0].url: "ejected", live[1].url: "alive"}
        assert "update_weights" in pool.servers()[0]["failure"]


async def test_health_checks_continue_after_a_server_refuses_to_join() -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live)) as pool:
        await pool.update_weights("/weights/1", 1)
        await live[1].kill()
        await until(lambda: states(pool)[live[1].url] == "ejected")
        await live[1].start("/update_weights_from_disk")
        await until(lambda: "update_weights" in (pool.servers()[1]["failure"] or ""))
        await live[1].kill()
        await live[1].start()
        await until(lambda: states(pool)[live[1].url] == "alive")
        assert live[1].wire.version == "1"


async def test_resume_works_while_a_server_is_gone() -> None:
    async with wires(1) as (wire,), pool_of(wire.url) as pool:
        gate = AdminGate(pool)
        await gate.admin.pause(PauseMode.IN_PLACE)
        await wire.kill()
        await until(lambda: states(pool)[wire.url] == "ejected")
        await gate.admin.resume()
        await wire.start()
        await until(lambda: states(pool)[wire.url] == "alive")
        assert (await gate.read(of_session("s"))).ids == following(PROMPT, 40)


async def test_waiting_for_a_server_ends_when_one_returns_joins_or_no_longer_leaves() -> None:
    async with wires(2, delay_s=0.005) as live, pool_of(live[0].url) as pool:
        await pool.until_alive()
        await live[0].kill()
        await until(lambda: states(pool)[live[0].url] == "ejected")
        waiting = [asyncio.create_task(pool.until_alive()) for _ in range(2)]
        await asyncio.sleep(0)
        await live[0].start()
        await asyncio.gather(*waiting)
        reading = asyncio.create_task(complete(pool, of_session("s")))
        await until(lambda: bool(pool.servers()[0]["in_flight"]))
        await pool.remove(live[0].url)
        waiting = [asyncio.create_task(pool.until_alive()) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        await pool.add(live[0].url)
        await asyncio.gather(*waiting)
        await reading
        await pool.remove(live[0].url)
        waiting = [asyncio.create_task(pool.until_alive()) for _ in range(2)]
        await asyncio.sleep(0)
        await pool.add(live[1].url)
        await asyncio.gather(*waiting)


async def test_a_server_that_cannot_be_resumed_is_ejected_until_it_can() -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live)) as pool, asyncio.timeout(60):
        gate = AdminGate(pool)
        await gate.admin.pause(PauseMode.RETRACT)
        live[0].forget("/continue_generation")
        await gate.admin.resume()
        assert states(pool) == {live[0].url: "ejected", live[1].url: "alive"}
        live[0].remember()
        await until(lambda: states(pool)[live[0].url] == "alive")
        replies = await asyncio.gather(*(gate.read(of_session(f"s{n}")) for n in range(4)))
        assert all(reply.ids == following(PROMPT, 40) for reply in replies)
        assert all(shown["served"] == 2 for shown in pool.servers())


async def test_no_server_joins_while_memory_is_released() -> None:
    async with wires(2) as live, pool_of(live[0].url) as pool:
        await pool.release_memory()
        with pytest.raises(InvalidRequest, match="resume_memory"):
            await pool.add(live[1].url)
        await pool.resume_memory()
        await pool.add(live[1].url)
        assert set(states(pool).values()) == {"alive"}


async def test_updates_made_on_the_servers_directly_are_followed() -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live)) as pool:
        for wire in live:
            wire.wire.version = "4"
            await wire.wire.engine.update_weights("/weights/4", 4)
        await until(lambda: pool._state.version == 4)
        assert set(states(pool).values()) == {"alive"}
        assert set((await complete(pool, of_session("s"))).versions) == {4}
        await live[1].kill()
        await until(lambda: states(pool)[live[1].url] == "ejected")
        await live[1].start()
        await until(lambda: "serves weight version 0, the others serve 4" in (pool.servers()[1]["failure"] or ""))


async def test_a_server_that_an_update_from_outside_has_not_reached_yet_stays_in_the_pool() -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        await pool.update_weights("/weights/1", 1)
        live[0].wire.version = "2"
        for member in pool._members:
            await pool._look_at(member)
        assert pool.info().weight_version == 2 and set(states(pool).values()) == {"alive"}


async def test_a_server_that_lost_a_request_gets_new_sessions_again_after_a_health_check() -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        pool._members[0].doubtful = True
        await complete(pool, of_session("a"))
        await pool._look_at(pool._members[0])
        await complete(pool, of_session("b"))
        assert [shown["served"] for shown in pool.servers()] == [1, 1]


async def test_a_server_ejected_between_two_resumes_of_memory_resumes_the_rest_when_it_returns() -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        await pool.release_memory()
        await pool.resume_memory(["weights"])
        pool._eject(pool._members[0], "it hangs")
        await pool.resume_memory()
        await pool._look_at(pool._members[0])
        assert states(pool)[live[0].url] == "alive"
        resumed = [body for path, body in live[0].wire.calls if path == "/resume_memory_occupation"]
        assert resumed == [{"tags": ["weights"]}, {"tags": ["cuda_graph", "kv_cache"]}]


async def test_servers_with_newer_weights_all_join_at_the_start() -> None:
    async with wires(3) as live:
        for wire in live[:2]:
            wire.wire.version = "3"
        async with pool_of(*(wire.url for wire in live)) as pool:
            assert states(pool) == {live[0].url: "alive", live[1].url: "alive", live[2].url: "missing"}
            assert pool.info().weight_version == 3


async def test_a_process_that_follows_starts_with_newer_weights_than_it_was_told() -> None:
    async with wires(2) as (first, second), pool_of(first.url, second.url, check_s=SELDOM_S) as leading:
        await leading.update_weights("w", 5)
        for wire in (first, second):
            wire.wire.version = "6"
        pool = Pool([first.url, second.url], opener_of(), start_timeout_s=5.0, check_s=CHECK_S)
        pool.leads = False
        await pool.adopt(leading.common())
        await pool.start()
        assert pool.info().weight_version == 6
        assert states(pool) == {first.url: "alive", second.url: "alive"}
        assert pool.common()["weights"] is None  # a server that joins later must not get those of version 5
        await pool.close()


async def test_rank_offsets_follow_the_world_sizes_and_must_be_integers() -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live)) as pool:
        await pool.transfer_weights(WeightTransfer.INIT_GROUP, {"rank_offset": 1, "world_size": 5})
        told = [wire.wire.calls[-1][1] for wire in live]
        assert told == [
            {"rank_offset": 1, "world_size": 5},
            {"rank_offset": 3, "world_size": 5},
        ]  # two ranks per server
        for wrong in ("1", 1.5, True, []):
            with pytest.raises(InvalidRequest) as raised:
                await pool.transfer_weights(WeightTransfer.INIT_GROUP, {"rank_offset": wrong})
            assert raised.value.param == "rank_offset"


class LateWire(LiveWire):
    """A server that answers once `ready` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.ready, self.asked = asyncio.Event(), asyncio.Event()
        self.ready.set()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.set()
        await self.ready.wait()
        await super()._answer(scope, receive, send)


async def test_two_servers_that_return_together_do_not_both_join_with_different_weights() -> None:
    late = LateWire()
    async with wires(1, late) as (wire, _), pool_of(wire.url, late.url, check_s=SELDOM_S) as pool:
        await pool.transfer_weights(WeightTransfer.BEGIN, {"weight_version": "3"})  # the pool cannot load these again
        members = {member.url: member for member in pool._members}
        for each in (wire, late):
            await each.kill()
            await pool._look_at(members[each.url])
            await each.start()
        assert set(states(pool).values()) == {"ejected"}
        wire.wire.version = "3"  # it was disconnected, and not restarted
        await wire.wire.engine.update_weights("/weights/3", 3)
        late.ready.clear()
        late.asked.clear()
        looks = [pool._look_at(members[each.url]) for each in (late, wire)]
        await late.asked.wait()
        await looks[1]
        late.ready.set()
        await looks[0]
        assert states(pool) == {wire.url: "alive", late.url: "ejected"}
        assert members[late.url].failure.endswith("serves weight version 0, the others serve 3")
        assert set((await complete(pool, of_session("s", tokens=2))).versions) == {3}


@pytest.mark.parametrize("whole", [True, False])
async def test_an_unstreamed_reply_is_requested_in_one_piece(whole: bool) -> None:
    async with wires(1) as (wire,), pool_of(wire.url) as pool:
        pieces = []
        for _ in range(10):  # tokens of a stream that wait for a busy reader are joined, at times all of them
            chunks = [chunk async for chunk in pool.generate(replace(of_session(""), whole=whole))]
            assert [token for chunk in chunks for token in chunk.ids] == following(PROMPT, 40)
            pieces.append(len([chunk for chunk in chunks if chunk.ids]))
        assert (max(pieces) == 1) is whole


class OldWire(LiveWire):
    """An older SGLang, which refuses `stream_interval` once `asked` requests to generate have come."""

    def __init__(self, asked: int) -> None:
        super().__init__()
        self.asked = asyncio.Barrier(asked)
        self.refused = 0

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/generate":
            return await super()._answer(scope, receive, send)
        body = b""
        while (message := await receive())["more_body"]:
            body += message["body"]
        body += message["body"]
        if b"stream_interval" in body:
            await self.asked.wait()
            self.refused += 1
            refusal = Response("unexpected argument 'stream_interval'", 400)
            return await refusal(scope, receive, send)

        read = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            return read.pop() if read else await receive()

        return await super()._answer(scope, again, send)


async def test_requests_that_an_old_server_refuses_together_for_their_stream_interval_all_run() -> None:
    old = OldWire(3)
    async with wires(0, old), pool_of(old.url) as pool:
        replies = await asyncio.gather(*(complete(pool, of_session(f"s{n}")) for n in range(3)))
        assert [reply.ids for reply in replies] == [following(PROMPT, 40)] * 3
        assert (await complete(pool, of_session("later"))).ids == following(PROMPT, 40)
        assert old.refused == 3  # the later request was not sent with it


async def test_a_server_counts_the_prompt_tokens_that_it_had_in_its_cache() -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        for number in range(3):
            await complete(pool, of_session("s", stream=number > 0))
        counted = {(shown["served"], shown["prompt_tokens"], shown["cached_tokens"]) for shown in pool.servers()}
        assert counted == {(3, 3 * len(PROMPT), 3 * 3), (0, 0, 0)}  # each reply says that 3 were cached


@pytest.mark.parametrize("change", ["flush", "weights", "weights of another worker", "memory", "death"])
async def test_sessions_are_placed_anew_once_servers_have_lost_their_caches(change: str) -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        for name in "ab":
            await complete(pool, of_session(name))
        assert [shown["session_count"] for shown in pool.servers()] == [1, 1]
        match change:
            case "flush":
                await pool.flush_cache()
            case "weights":
                await pool.update_weights("/weights/1", 1)
            case "weights of another worker":
                await pool.adopt({**pool.common(), "version": 1})
            case "memory":
                await pool.release_memory(["kv_cache"])
            case "death":
                await live[0].kill()
                await pool._look_at(pool._members[0])
        assert [shown["session_count"] for shown in pool.servers()] == [0, int(change == "death")]


async def test_a_server_named_twice_is_one_member() -> None:
    async with wires(1) as (wire,), pool_of(wire.url, wire.url + "/", wire.url + "/v1") as pool:
        assert states(pool) == {wire.url: "alive"}
        with pytest.raises(InvalidRequest, match="already"):
            await pool.add(wire.url + "/")


async def test_a_server_removed_while_it_joins_does_not_join() -> None:
    async with wires(2) as live, pool_of(live[0].url) as pool:
        await pool.update_weights("/weights/1", 1)
        live[1].wire.before_update.clear()
        joining = asyncio.create_task(pool.add(live[1].url))
        await until(lambda: live[1].url in states(pool))
        with pytest.raises(InvalidRequest, match="already"):
            await pool.add(live[1].url)
        await pool.remove(live[1].url)
        live[1].wire.before_update.set()
        await joining
        assert list(states(pool)) == [live[0].url]


async def test_servers_with_a_key_are_called_with_it() -> None:
    wire = LiveWire(key="sesame")
    await wire.start()
    try:
        async with pool_of(wire.url, keys=Keys(api="sesame")) as pool:
            assert (await complete(pool, of_session("s"))).ids == following(PROMPT, 40)
            await pool.pause(PauseMode.RETRACT)
            await pool.resume()
        with pytest.raises(ConfigurationError, match="api_key=KEY") as raised:
            opener = connect(VOCABULARY, None, keys=Keys(api="wrong"))
            await Pool([wire.url], opener, start_timeout_s=0.0, check_s=CHECK_S).start()
        assert "wrong" not in str(raised.value)
    finally:
        await wire.kill()


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://h:1", "http://h:1"),
        (" http://h:1/ ", "http://h:1"),
        ("HTTP://H:1/v1/", "http://h:1"),
        ("https://h/route/v1", "https://h/route"),
        ("http://[::1]:30000", "http://[::1]:30000"),
    ],
)
def test_server_urls_are_normalised(text: str, url: str) -> None:
    assert server_url(text) == url


@pytest.mark.parametrize("text", ["h:1", "ftp://h", "http://", "http://h:port", "http://h?a=b", "http://key@h:1"])
def test_a_malformed_server_url_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        server_url(text)
    assert raised.value.param == "url"


async def test_a_pool_without_a_server_logs_once_that_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    wire = LiveWire()
    await wire.start()
    url = wire.url
    await wire.kill()
    pool = Pool([url], connect(VOCABULARY, None), start_timeout_s=30.0, check_s=CHECK_S)
    starting = asyncio.create_task(pool.start())
    await until(lambda: bool(caplog.records))
    await wire.start()
    await starting
    try:
        assert [record.getMessage() for record in caplog.records if "waiting up to 30 s" in record.getMessage()] == [
            f"no engine server answers yet; waiting up to 30 s ({url} does not answer (ConnectionRefusedError))"
        ]
    finally:
        await pool.close()
        await wire.kill()


async def test_a_pool_that_waits_says_why_when_the_reason_changes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = iter([EngineLost("refused"), EngineLost("refused"), EngineLost("loading"), LookupError("enough")])

    async def reach(url: str) -> object:
        raise next(reasons)

    pool = Pool(["http://h:1"], connect(VOCABULARY, None), start_timeout_s=30.0, check_s=0.0)
    monkeypatch.setattr(pool, "_reach", reach)
    with pytest.raises(LookupError):
        await pool.start()
    said = [record.getMessage().rpartition("(")[2] for record in caplog.records]
    assert said == ["http://h:1: refused)", "http://h:1: loading)"]


async def test_servers_that_are_gone_before_they_get_a_request_are_no_losses_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody looks at the servers, so the request itself finds out about each of more than it may lose."""
    monkeypatch.setattr(gates, "_MOST_LOSSES", 1)
    async with wires(4, delay_s=0.005) as live, pool_of(*(w.url for w in live), check_s=SELDOM_S) as pool:
        gate = AdminGate(pool)
        reading = asyncio.create_task(gate.read(of_session("s")))
        await until(lambda: any(wire.wire.engine.running for wire in live))
        await asyncio.gather(*(wire.kill() for wire in live))
        await until(lambda: gate.waiting == 1)
        assert set(states(pool).values()) == {"ejected"} and not gate.running
        await live[2].start()
        await pool._look_at(next(member for member in pool._members if member.url == live[2].url))
        assert (await reading).ids == following(PROMPT, 40)


async def test_a_server_that_is_alive_and_loses_each_request_is_not_asked_for_ever() -> None:
    async with wires(1) as live, pool_of(live[0].url) as pool, asyncio.timeout(60):
        live[0].refuse_generate = True
        with pytest.raises(EngineLost, match="queue is full"):
            await AdminGate(pool).read(of_session("s"))


async def test_a_reply_that_is_abandoned_as_it_was_sent_did_not_run() -> None:
    async with wires(1) as live:
        live[0].hung = True
        server = ServerConnection(live[0].url)
        for seconds, ran in ((0.0, False), (connection._PROBE_S + 1.0, True)):
            asking = asyncio.create_task(server.generate("/generate", [b"{}"], {}))
            await until(lambda: bool(server._replies))
            for reply in server._replies:
                reply.sent -= seconds
            server.cut()
            with pytest.raises(EngineLost) as lost:
                await asking
            assert lost.value.ran is ran
        await server.close()


async def test_the_look_at_a_server_ends_before_it_has_left() -> None:
    """Else it could go on to bring the server back into the pool's state, after the server has joined anew."""
    async with wires(2) as live, pool_of(live[0].url, live[1].url, check_s=SELDOM_S) as pool:
        await pool.update_weights("/weights/1", 1)
        await live[1].kill()
        await live[1].start()
        member = pool._members[1]
        await pool._look_at(member)
        assert states(pool)[live[1].url] == "ejected"
        live[1].wire.before_update.clear()
        look = pool._look_at(member)
        await until(lambda: live[1].wire.updating)
        await pool.remove(live[1].url)
        assert look.cancelled() and not pool._looks
        live[1].wire.before_update.set()
        await pool.add(live[1].url)
        assert states(pool) == dict.fromkeys((live[0].url, live[1].url), "alive") and not member.alive


PARTS = [{"names": ["a"]}, {"names": ["b"]}]


async def restarted(pool: Pool, wire: LiveWire) -> None:
    """Start an engine server anew; it is back in the pool, with the weights that the others had loaded from disk."""
    await wire.kill()
    await wire.start()
    member = next(member for member in pool._members if member.url == wire.url)
    await pool._look_at(member)
    await pool._look_at(member)
    assert states(pool)[wire.url] == "alive" and wire.wire.version == "1"


@pytest.mark.parametrize(
    "steps",
    [
        [
            (WeightTransfer.BEGIN, {}),
            *((WeightTransfer.FROM_DISTRIBUTED, part) for part in PARTS),
            (WeightTransfer.END, {"weight_version": "2"}),
        ],
        [
            *((WeightTransfer.FROM_DISTRIBUTED, part) for part in PARTS),
            (WeightTransfer.FROM_DISTRIBUTED, {"weight_version": "2"}),
        ],
    ],
)
async def test_a_server_that_returns_in_the_middle_of_a_weight_transfer_serves_no_part_of_it(
    steps: list[tuple[WeightTransfer, dict[str, Any]]],
) -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        await pool.update_weights("/weights/1", 1)
        await pool.transfer_weights(*steps[0])
        await restarted(pool, live[1])
        before = len(live[1].wire.calls)
        for step, fields in steps[1:]:
            await pool.transfer_weights(step, fields)
        assert len(live[1].wire.calls) == before
        assert states(pool) == {live[0].url: "alive", live[1].url: "ejected"}
        reply = await AdminGate(pool).read(of_session("s"))
        assert set(reply.versions) == {2} and live[0].wire.version == "2"


async def test_a_weight_transfer_whose_beginning_no_server_has_is_refused_once() -> None:
    async with wires(1) as (wire,), pool_of(wire.url, check_s=SELDOM_S) as pool:
        await pool.update_weights("/weights/1", 1)
        await pool.transfer_weights(WeightTransfer.FROM_DISTRIBUTED, PARTS[0])
        await restarted(pool, wire)
        with pytest.raises(EngineUnavailable, match="begin it anew"):
            await pool.transfer_weights(WeightTransfer.FROM_DISTRIBUTED, PARTS[1])
        assert states(pool) == {wire.url: "alive"} and wire.wire.version == "1"
        await pool.transfer_weights(WeightTransfer.FROM_DISTRIBUTED, PARTS[0])
        await pool.transfer_weights(WeightTransfer.FROM_DISTRIBUTED, {**PARTS[1], "weight_version": "2"})
        assert states(pool) == {wire.url: "alive"} and wire.wire.version == "2"


@pytest.mark.parametrize("end", ["resume", "update_weights", "init_group"])
async def test_a_server_that_joins_after_a_weight_transfer_gets_the_next_one(end: str) -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        await pool.update_weights("/weights/1", 1)
        await pool.pause(PauseMode.RETRACT)
        await pool.transfer_weights(WeightTransfer.FROM_DISTRIBUTED, PARTS[0])  # its trainer then dies
        if end == "resume":
            await pool.resume()
        elif end == "update_weights":
            await pool.update_weights("/weights/1", 1)
        else:
            await pool.transfer_weights(WeightTransfer.INIT_GROUP, {})
        await restarted(pool, live[1])
        await pool.transfer_weights(WeightTransfer.FROM_DISTRIBUTED, {**PARTS[0], "weight_version": "2"})
        assert set(states(pool).values()) == {"alive"} and {wire.wire.version for wire in live} == {"2"}


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_server_that_may_lack_parts_of_a_weight_transfer_loads_weights_before_it_joins(leaves: bool) -> None:
    """The name of its version proves nothing if each part names it."""
    async with wires(2) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        await pool.update_weights("/weights/1", 1)
        for part in PARTS:
            await pool.transfer_weights(WeightTransfer.FROM_DISTRIBUTED, {**part, "weight_version": "2"})
            if leaves:
                await pool.remove(live[1].url)
                with pytest.raises(InvalidRequest, match="may lack parts of the weights"):
                    await pool.add(live[1].url)
                break
            pool._eject(pool._members[1], "it does not answer")
            await pool._look_at(pool._members[1])
            assert "may lack parts of the weights" in pool.servers()[1]["failure"]
        assert live[1].wire.version == "2"
        await pool.update_weights("/weights/2", 2)
        await (pool.add(live[1].url) if leaves else pool._look_at(pool._members[1]))
        assert [path for path, _ in live[1].wire.calls].count("/update_weights_from_disk") == 2
        assert set(states(pool).values()) == {"alive"}


@pytest.mark.parametrize("reached", [False, True])
async def test_memory_is_resumed_once_of_a_server_that_may_die_of_it(reached: bool) -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        await pool.release_memory()
        member, asked = pool._members[0], list[Sequence[str]]()
        pool._eject(member, "it died")
        await pool.resume_memory()
        resume = member.engine.resume_memory

        async def dies(tags: Sequence[str] = ()) -> None:
            asked.append(tags)
            if len(asked) == 1:
                raise EngineLost("it died of that", ran=reached)
            await resume(tags)

        member.engine.resume_memory = dies  # type: ignore[method-assign]
        await pool._look_at(member)
        assert states(pool)[member.url] == "ejected"
        await pool._look_at(member)
        assert states(pool)[member.url] == "alive" and len(asked) == (1 if reached else 2)
