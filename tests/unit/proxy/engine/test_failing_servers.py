"""Servers that fail requests, that are no engine servers, and that mend; requests that no server can answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.responses import Response

from proxy.engine.chunks import TokenChunk
from proxy.engine.contract import CollectedReply
from proxy.engine.interface import PauseMode
from proxy.engine.servers import breaker, proof
from proxy.engine.servers import pool as pools
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.pool import Pool
from proxy.types import Ids, ids_of
from tests.engines.gates import AdminGate
from tests.engines.pools import CHECK_S, OVER_BOTH, PROMPT, SELDOM_S, of_session, opener_of, pool_of, states, wires
from tests.engines.scripts import VOCABULARY, following
from tests.engines.wire import LiveWire, serving_wire
from tests.support import until
from tests.unit.proxy.engine.gated import GRAMMAR
from tests.wide import first
from tokengrove.errors import ConfigurationError, EngineFailed, EngineLost, EngineTimeout, InvalidRequest
from tokengrove.reasons import FinishReason

POISON = ids_of([599] * 4)


def always(prompt: Any) -> bool:
    return True


def poisonous(prompt: Any) -> bool:
    return list(prompt[:4]) == POISON.tolist()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes of failing servers follow each other at once."""
    monkeypatch.setattr(breaker, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(breaker, "_LONGEST_WAIT_S", 0.01)


def asked(wire: LiveWire) -> int:
    """The number of requests for an answer that came to a server, without its proofs."""
    return sum(prompt != [0] for prompt in wire.wire.asked)


def served(pool: Pool) -> dict[str, int]:
    return {shown["url"]: shown["served"] for shown in pool.servers()}


async def read_all(gate: AdminGate, names: list[str], prompt: Ids = PROMPT, *, stream: bool = True) -> None:
    """Read the replies of sessions at once, and check their tokens."""
    for reply in await asyncio.gather(*(gate.read(of_session(name, prompt, stream=stream)) for name in names)):
        assert reply.ids == following(prompt, 40)


@OVER_BOTH
@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_fails_fast_draws_no_turns_and_fails_none(stream: bool, kind: str) -> None:
    async with (
        wires(2, delay_s=0.0005, kind=kind) as live,
        pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool,
    ):
        gate = AdminGate(pool)
        await read_all(gate, [f"s{n}" for n in range(6)], stream=stream)
        live[0].wire.fails = always
        broken, before = live[0].url, asked(live[0])
        for turn in range(10):
            await read_all(gate, [f"s{n}" for n in range(6)] + [f"new-{turn}-{n}" for n in range(6)], stream=stream)
        assert asked(live[0]) - before <= 12  # those of the first turn, which were sent before any had failed
        assert states(pool) == {broken: "failing", live[1].url: "alive"}
        assert "illegal memory access" in pool.servers()[0]["failure"]


async def test_a_failing_server_is_probed_until_it_samples_and_then_gets_requests_again(
    quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live)) as pool:
        caplog.set_level("INFO")
        gate = AdminGate(pool)
        live[0].wire.fails = always
        await read_all(gate, [f"s{n}" for n in range(8)])
        await until(lambda: states(pool)[live[0].url] == "failing")
        probes, before = len(live[0].wire.asked), asked(live[0])
        await until(lambda: len(live[0].wire.asked) > probes + 2)
        await read_all(gate, [f"t{n}" for n in range(8)])
        assert asked(live[0]) == before and states(pool)[live[0].url] == "failing"
        live[0].wire.fails = lambda prompt: False
        await until(lambda: states(pool)[live[0].url] == "alive")
        await read_all(gate, [f"u{n}" for n in range(8)])
        assert asked(live[0]) > before
        told = [record for record in caplog.records if record.args and record.args.get("server") == live[0].url]  # type: ignore[union-attr]
        events = [
            text for text in (record.getMessage() for record in told) if "joined" not in text and "flag" not in text
        ]
        assert events == [
            "engine server is shut out: others answer what it fails",
            "engine server gets requests again",
        ]


async def test_a_request_that_every_server_fails_is_asked_of_two_and_opens_no_breaker(quick: None) -> None:
    async with wires(3) as live, pool_of(*(wire.url for wire in live)) as pool:
        gate = AdminGate(pool)
        for wire in live:
            wire.wire.fails = poisonous
        for number in range(20):
            before = sum(asked(wire) for wire in live)
            with pytest.raises(EngineFailed, match="illegal memory access"):
                await gate.read(of_session(f"p{number % 5}", POISON))
            assert sum(asked(wire) for wire in live) == before + 2
            await read_all(gate, [f"s{number}"])
        assert set(states(pool).values()) == {"alive"}


async def test_the_last_server_is_never_shut_out(quick: None) -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live)) as pool:
        gate = AdminGate(pool)
        live[0].wire.fails = always
        await read_all(gate, [f"s{n}" for n in range(8)])
        await until(lambda: states(pool)[live[0].url] == "failing")
        await live[1].kill()
        await until(lambda: states(pool)[live[1].url] == "ejected")
        pool.check_alive()
        before = asked(live[0])
        for _ in range(5):
            with pytest.raises(EngineFailed):
                await gate.read(of_session("s"))
        assert asked(live[0]) == before + 5
        live[0].wire.fails = poisonous
        await read_all(gate, ["s"])
        assert states(pool)[live[0].url] == "alive"


@pytest.mark.parametrize("count", [1, 2])
async def test_of_the_servers_that_all_fail_one_stays_in(quick: None, count: int) -> None:
    async with wires(count) as live, pool_of(*(wire.url for wire in live)) as pool:
        gate = AdminGate(pool)
        for wire in live:
            wire.wire.fails = always
        for number in range(12):
            with pytest.raises(EngineFailed):
                await gate.read(of_session(f"s{number}"))
        assert "alive" in states(pool).values()


@OVER_BOTH
@pytest.mark.parametrize("stops_short", [False, True])
async def test_a_reply_that_breaks_off_goes_on_elsewhere_with_the_same_tokens(stops_short: bool, kind: str) -> None:
    async with (
        wires(2, delay_s=0.002, kind=kind) as live,
        pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool,
    ):
        gate = AdminGate(pool)
        live[0].wire.breaks_after, live[0].wire.stops_short = 30, stops_short
        for number in range(3):
            pool._members[0].served = -1  # so that it is chosen
            pool._members[0].doubtful = False
            await read_all(gate, [f"s{number}"])
        rests = [prompt for prompt in live[1].wire.asked if len(prompt) > len(PROMPT)]
        assert rests and all(rest == [*PROMPT, *following(PROMPT, len(rest) - len(PROMPT))] for rest in rests)
        assert states(pool)[live[0].url] == "failing"  # each time the other one answered the same request


async def test_a_begun_reply_under_a_grammar_fails_with_the_error() -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        for wire in live:
            wire.wire.breaks_after = 7
        with pytest.raises(EngineFailed, match="illegal memory access"):
            await AdminGate(pool).read(replace(of_session("s"), grammar=GRAMMAR))


async def test_a_server_with_a_full_queue_has_not_failed(quick: None) -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live)) as pool:
        live[0].refuse_generate = True
        gate = AdminGate(pool)
        for number in range(12):
            await read_all(gate, [f"s{number}"])
        await until(lambda: "the queue is full" in (pool.servers()[0]["failure"] or ""))
        assert set(states(pool).values()) == {"alive"}
        live[0].refuse_generate = False
        await until(lambda: pool.servers()[0]["failure"] is None)


async def test_a_request_that_is_refused_is_not_asked_elsewhere() -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        with pytest.raises(InvalidRequest):
            await AdminGate(pool).read(of_session("s", ids_of([1] * 9000), 1))
        assert sum(asked(wire) for wire in live) <= 1
        assert [shown["failure"] for shown in pool.servers()] == [None, None]


async def test_a_member_that_becomes_a_web_page_is_ejected(quick: None) -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live)) as pool:
        live[0].page = True
        gate = AdminGate(pool)
        for number in range(6):
            await read_all(gate, [f"s{number}", f"t{number}"])
        await until(lambda: states(pool)[live[0].url] == "ejected")
        assert "not an SGLang server" in pool.servers()[0]["failure"]
        live[0].page = False
        await until(lambda: states(pool)[live[0].url] == "alive")


class Impostor(LiveWire):
    """A server that describes itself as SGLang does and answers /generate with `answer`; None: never."""

    def __init__(self, answer: Response | None, *, ready: int = 404) -> None:
        super().__init__()
        self.answer, self.ready = answer, ready

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/generate":
            self.wire.asked.append([0])
            if self.answer is not None:
                return await self.answer(scope, receive, send)
            return await asyncio.Event().wait()  # type: ignore[return-value]
        if scope["path"] == "/ready":
            return await Response(status_code=self.ready)(scope, receive, send)
        return await super()._answer(scope, receive, send)


def page() -> LiveWire:
    wire = LiveWire()
    wire.page = True
    return wire


def impostor(text: str, status: int = 200) -> Callable[[], LiveWire]:
    return lambda: Impostor(Response(text, status, media_type="application/json"))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (page, "neither an SGLang nor a vLLM server"),
        (impostor("{}"), "does not sample a token: .* lacks 'meta_info'"),
        (impostor("[]"), "does not sample a token"),
        (impostor("<html>"), "does not sample a token: .* not JSON"),
        (impostor('{"error": "CUDA"}', 500), "does not sample a token: .* CUDA"),
        (impostor("{}", 404), "does not sample a token: .* has no /generate"),
        (impostor('{"meta_info": {"completion_tokens": 1, "finish_reason": "length"}, "output_ids": [5]}'), "logprob"),
        (impostor('{"meta_info": {"completion_tokens": 0, "finish_reason": "length"}}'), "gave none"),
        (lambda: Impostor(None), "gave no token within"),
    ],
)
async def test_a_server_that_samples_no_token_does_not_join(
    make: Callable[[], LiveWire], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "_PROOF_S", 0.2)
    false = make()
    async with wires(1, false) as (wire, _), pool_of(wire.url, false.url) as pool:
        assert states(pool) == {wire.url: "alive", false.url: "missing"}
        await pool.remove(false.url)
        with pytest.raises(InvalidRequest, match=why) as raised:
            await pool.add(false.url)
        assert raised.value.param == "url" and false.url in raised.value.message
        assert list(states(pool)) == [wire.url]
        alone = Pool([false.url], opener_of(), start_timeout_s=0.0, check_s=CHECK_S)
        with pytest.raises(ConfigurationError, match=why):
            await alone.start()


async def test_a_server_that_says_it_is_paused_joins_as_the_last_choice_until_it_samples(
    monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    monkeypatch.setattr(proof, "_PROOF_S", 0.1)
    held = Impostor(None, ready=503)
    async with wires(1, held) as (wire, _), pool_of(held.url, wire.url) as pool:
        assert set(states(pool).values()) == {"alive"}
        await read_all(AdminGate(pool), ["a", "b"])
        assert served(pool) == {held.url: 0, wire.url: 2}


@pytest.mark.parametrize("kind", ["sglang", "sglang-incremental", "vllm"])
async def test_a_server_of_each_kind_joins_by_sampling_one_token(kind: str) -> None:
    async with serving_wire(kind) as (url, _):
        pool = Pool([url], connect(VOCABULARY, None), start_timeout_s=5.0, check_s=SELDOM_S)
        await pool.start()
        try:
            assert states(pool) == {url: "alive"} and not pool._members[0].doubtful
            assert served(pool) == {url: 0}
        finally:
            await pool.close()


async def test_a_server_that_gives_no_token_loses_its_sessions(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_SILENT_S", 0.05)
    monkeypatch.setattr(proof, "_PROOF_S", 0.05)
    async with wires(2) as live, pool_of(*(wire.url for wire in live)) as pool:
        live[0].arriving.clear()
        gate = AdminGate(pool, engine_timeout_s=0.1)
        await read_all(gate, ["a", "b"])
        await until(lambda: states(pool)[live[0].url] == "failing")
        await read_all(gate, ["a", "b"])
        live[0].arriving.set()
        await until(lambda: states(pool)[live[0].url] == "alive")


class Odd(LiveWire):
    """A server that answers `path` with `text`."""

    def __init__(self, kind: str, path: str, text: str) -> None:
        super().__init__(kind)
        self.path, self.text = path, text

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == self.path:
            return await Response(self.text)(scope, receive, send)
        return await super()._answer(scope, receive, send)


@pytest.mark.parametrize(
    ("kind", "path", "text"),
    [
        ("sglang", "/server_info", '{"max_req_input_len": "long"}'),
        ("sglang", "/server_info", '{"max_req_input_len": [1]}'),
        ("vllm", "/v1/models", '{"data": [5]}'),
        ("vllm", "/v1/models", '{"data": {"a": 1}}'),
        ("vllm", "/v1/models", '{"data": [{"id": "m", "max_model_len": "long"}]}'),
    ],
)
async def test_a_server_that_describes_itself_in_another_form_is_refused(kind: str, path: str, text: str) -> None:
    odd = Odd(kind, path, text)
    async with wires(1, odd) as (wire, _), pool_of(wire.url) as pool:
        with pytest.raises(InvalidRequest, match="does not describe itself"):
            await pool.add(odd.url)
        assert states(pool) == {wire.url: "alive"}


async def during_pause(pool: Pool, gate: AdminGate) -> Callable[[], Awaitable[None]]:
    await gate.admin.pause(PauseMode.RETRACT)
    return gate.admin.resume


async def during_release(pool: Pool, gate: AdminGate) -> Callable[[], Awaitable[None]]:
    await gate.admin.release_memory((), PauseMode.ABORT)
    return lambda: gate.admin.resume_memory(())


@pytest.mark.parametrize("begin", [during_pause, during_release])
async def test_no_server_is_probed_while_paused_or_without_its_memory(
    begin: Callable[[Pool, AdminGate], Awaitable[Callable[[], Awaitable[None]]]], quick: None
) -> None:
    async with wires(2) as live, pool_of(*(wire.url for wire in live)) as pool:
        gate = AdminGate(pool)
        live[0].wire.fails = always
        await read_all(gate, [f"s{n}" for n in range(8)])
        await until(lambda: states(pool)[live[0].url] == "failing")
        end = await begin(pool, gate)
        probes = len(live[0].wire.asked)
        live[0].wire.fails = lambda prompt: False
        for member in pool._members * 3:
            await pool._look_at(member)
        assert len(live[0].wire.asked) == probes and states(pool)[live[0].url] == "failing"
        await end()
        await until(lambda: states(pool)[live[0].url] == "alive")


async def test_a_pause_waits_for_a_probe_that_ends_and_gives_up_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proof, "_END_S", 0.05)
    async with wires(2) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        member = pool._members[0]
        member.doubtful = True
        live[0].arriving.clear()
        looking = pool._look_at(member)
        await until(lambda: bool(pool._trust._proofs._running))
        await pool.pause(PauseMode.ABORT)
        await looking
        assert member.doubtful and states(pool)[live[0].url] == "alive"
        live[0].arriving.set()
        await pool.resume()
        await pool._look_at(member)
        assert not member.doubtful


async def test_a_server_that_joins_during_a_pause_samples_its_first_token_after_it() -> None:
    async with wires(2) as live, pool_of(live[0].url, check_s=SELDOM_S) as pool:
        gate = AdminGate(pool)
        await gate.admin.pause(PauseMode.IN_PLACE)
        await pool.add(live[1].url)
        assert not live[1].wire.asked and states(pool)[live[1].url] == "alive"
        await gate.admin.resume()
        await read_all(gate, ["s"])
        assert not live[1].wire.asked  # it is the last choice
        await pool._look_at(pool._members[1])
        await read_all(gate, ["t"])
        assert asked(live[1]) == 1


@pytest.mark.parametrize("seed", first(range(4)))
async def test_random_failures_fail_no_healthy_turn_and_poison_opens_no_breaker(seed: int, quick: None) -> None:
    """One of the servers fails at any time, by errors or broken streams; sessions also send poisonous requests."""
    rng = random.Random(seed)
    async with wires(rng.choice([2, 3, 4])) as live, pool_of(*(wire.url for wire in live)) as pool:
        gate, blamed = AdminGate(pool), set[str]()

        async def healthy(number: int) -> None:
            prompt = ids_of(rng.choices(range(500), k=rng.randint(1, 30)))
            tokens, stream = rng.randint(1, 50), rng.random() < 0.5
            reply: CollectedReply = await gate.read(of_session(f"s{number % 9}", prompt, tokens, stream=stream))
            assert reply.ids == following(prompt, tokens)

        async def poisoned(number: int) -> None:
            before = sum(member.served for member in pool._members)
            with pytest.raises((EngineFailed, EngineLost)):
                await gate.read(of_session(f"s{number % 9}", POISON))
            assert sum(member.served for member in pool._members) > before

        for wire in live:
            wire.wire.fails = poisonous
        for _ in range(6):
            broken = rng.choice([None, *live])
            if broken is not None:
                blamed.add(broken.url)
                broken.wire.breaks_after = rng.choice([None, 1, 5])
                if broken.wire.breaks_after is None:
                    broken.wire.fails = always
            work = [poisoned(n) if rng.random() < 0.2 else healthy(n) for n in range(30)]
            await asyncio.gather(*work)
            assert all(state == "alive" for url, state in states(pool).items() if url not in blamed)
            assert any(state == "alive" for state in states(pool).values())
            if broken is not None:
                broken.wire.fails, broken.wire.breaks_after = poisonous, None
            await until(lambda: all(not member.doubtful and member.sound for member in pool._members))
            blamed.clear()
        assert all(shown["in_flight"] == 0 for shown in pool.servers())


@OVER_BOTH
@pytest.mark.parametrize("tokens", [0, 5])
async def test_what_a_server_that_hangs_was_sampling_goes_on_elsewhere_below_any_engine_timeout(
    tokens: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers probes, so it stays alive. At most once: the next server has the whole timeout."""
    async with (
        wires(2, delay_s=0.002, kind=kind) as live,
        pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool,
    ):
        gate, reply, lost = AdminGate(pool, engine_timeout_s=0.3), CollectedReply(), list[str]()
        monkeypatch.setattr(pool._events, "lost", lambda server, why: lost.append(server))

        def take(chunk: TokenChunk) -> FinishReason | None:
            reply.add(chunk)
            if len(reply.ids) == tokens:
                live[0].wire.engine._resumed.clear()
            return None

        if not tokens:
            live[0].wire.engine._resumed.clear()
        await gate.sample(of_session("s"), take)
        assert reply.ids == following(PROMPT, 40)
        assert served(pool) == {live[0].url: 1, live[1].url: 1}
        assert lost == [live[0].url]  # as often as the request was submitted again
        for wire in live:
            wire.wire.engine._resumed.clear()
        with pytest.raises(EngineTimeout):
            await gate.read(of_session("t"))
        assert served(pool) == {live[0].url: 2, live[1].url: 2}


async def test_a_request_without_another_server_fails_at_its_first_timeout() -> None:
    async with wires(1) as (wire,), pool_of(wire.url, check_s=SELDOM_S) as pool:
        wire.wire.engine._resumed.clear()
        with pytest.raises(EngineTimeout):
            await AdminGate(pool, engine_timeout_s=0.05).read(of_session("s"))
        assert served(pool) == {wire.url: 1}


async def test_a_doubted_server_that_is_ejected_is_not_asked_for_a_token() -> None:
    """It may still be paused, and would keep the request."""
    async with wires(2) as live, pool_of(*(wire.url for wire in live), check_s=SELDOM_S) as pool:
        await pool.update_weights("/weights/1", 1)
        await live[0].kill()
        await live[0].start()
        member = pool._members[0]
        pool._trust.doubt(member, EngineLost("it lost a request"))
        await pool._look_at(member)
        assert states(pool)[live[0].url] == "ejected"
        assert not live[0].wire.asked and member.doubtful
