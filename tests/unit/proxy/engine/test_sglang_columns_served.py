"""Side columns of SGLang servers over HTTP: what is asked, pools of servers, lost servers and pauses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from proxy.engine.chunks import TokenChunk
from proxy.engine.expert_layers import ExpertLayers
from proxy.engine.grammar import Grammar, GrammarPart
from proxy.engine.interface import PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.engine.servers import sglang_server
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.pool import Pool
from proxy.engine.servers.sglang_server import SglangServer
from proxy.side_columns.columns import ColumnRequest, Columns
from proxy.side_columns.rows import SideRows
from proxy.turns.column_log import ColumnLog
from tests.engines.gates import AdminGate
from tests.engines.pools import CHECK_S, PROMPT, of_session, states, wires
from tests.engines.scripts import VOCABULARY
from tests.engines.wire import LiveWire, experts_of, kept_logprob, kept_with
from tests.support import until
from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.options.start import Replay
from tokengrove.reasons import FinishReason

LAYERS = ExpertLayers(3, (0, 1, 2), 2, 8)
DENSE = ExpertLayers(3, (), 0)
BOTH = frozenset({Replay.KEPT, Replay.EXPERTS})


def recording(
    tokens: int = 12, *, start: int = 0, stream: bool = True, top_k: int = 20, asked: frozenset[Replay] = BOTH
) -> GenerateRequest:
    request = of_session("s", tokens=tokens, stream=stream)
    sampling = request.sampling._replace(top_k=top_k)
    return replace(request, sampling=sampling, columns=ColumnRequest(asked, 512, start))


class Recorded:
    """The tokens of a reply with their side columns, as a turn takes them."""

    def __init__(self, request: GenerateRequest) -> None:
        assert request.columns is not None
        self.log, self.request, self.ids = ColumnLog(request.columns, 0), request, list[int]()

    def take(self, chunk: TokenChunk) -> None:
        self.log.add(chunk, len(self.request.prompt) + len(self.ids))
        self.ids += chunk.ids

    def taken(self) -> tuple[Columns, Mapping[str, int]]:
        assert self.request.columns is not None
        start = self.request.columns.start
        return self.log.taken(start + 1 if start else 0, len(self.request.prompt), len(self.ids))

    def rows(self, name: str) -> SideRows:
        return self.taken()[0][name].rows

    def missing(self) -> dict[str, int]:
        return dict(self.taken()[1])

    def check_sets(self) -> None:
        assert [each.tolist() for each in self.rows("kept").sets()] == [sorted(kept_with(each)) for each in self.ids]
        assert self.rows("kept_logprobs").values.tolist() == [kept_logprob(each) for each in self.ids]

    def check_experts(self, missing: Sequence[int] = ()) -> None:
        """Check the rows of all tokens but the last; `missing`: the positions that have none."""
        assert self.request.columns is not None
        whole, rows, start = [*PROMPT, *self.ids], self.rows("routed_experts"), self.request.columns.start
        found = {place: rows.values[place - start].tolist() for place in range(start, len(whole) - 1)}
        for place in missing:
            assert found.pop(place) == [[255, 255]] * 3
        assert found == {place: experts_of(place, whole[place], 3) for place in found}


async def recorded(engine: Any, request: GenerateRequest) -> Recorded:
    reply = Recorded(request)
    await engine.sample(request, reply.take)
    return reply


@contextlib.asynccontextmanager
async def server_of(
    *, incremental: bool = False, layers: ExpertLayers | None = LAYERS, delay_s: float = 0.0
) -> AsyncIterator[tuple[SglangServer, Any]]:
    async with wires(1, delay_s=delay_s) as (live,):
        live.wire.layers, live.wire.incremental = 3, incremental
        engine = SglangServer(live.url, VOCABULARY, layers=layers)
        await engine.start()
        yield engine, live.wire
        await engine.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("incremental", [True, False])
async def test_a_turn_gets_the_sets_of_its_tokens_and_the_experts_of_the_tokens_that_it_lacks(
    incremental: bool, stream: bool
) -> None:
    async with server_of(incremental=incremental) as (engine, wire):
        reply = await recorded(engine, recording(start=15, stream=stream))
        reply.check_sets()
        reply.check_experts()
        assert not any(reply.missing().values())
        asked = {"return_sampling_mask": True, "return_routed_experts": True, "routed_experts_start_len": 15}
        assert wire.columns == [asked]


async def test_a_request_without_columns_asks_for_none() -> None:
    async with server_of() as (engine, wire):
        request = replace(recording(), columns=None)
        await engine.sample(request, lambda chunk: None)
        assert wire.columns == [{}]


async def test_a_server_that_reports_no_rows_though_asked_gives_a_turn_with_missing_rows() -> None:
    async with server_of() as (engine, wire):
        wire.lacks_rows = True
        reply = await recorded(engine, recording())
        assert len(reply.ids) == 12
        assert reply.missing() == {"kept": 12, "kept_logprobs": 12, "routed_experts": 31}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after", [0, 5])
async def test_a_request_that_ends_because_of_its_kept_sets_goes_on_without(
    stream: bool, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with server_of() as (engine, wire):
        plain = await recorded(engine, recording(stream=stream))
        wire.refuses_sets_after = max(after, 1)
        for _ in range(2):
            reply = await recorded(engine, recording(stream=stream))
            assert reply.ids == plain.ids
            assert reply.missing()["kept"] >= 12 - after
        [line] = [each for each in caplog.records if "does not report the kept sets" in each.getMessage()]
        assert line.levelno == logging.WARNING and "cutoff ties" in line.getMessage()


async def test_an_output_under_a_grammar_that_has_begun_fails_with_the_reason() -> None:
    async with server_of(delay_s=0.02) as (engine, wire):
        wire.refuses_sets_after = 5
        request = replace(recording(), grammar=Grammar(((GrammarPart("yes"),),)))
        with pytest.raises(InvalidRequest, match="cutoff ties"):
            await recorded(engine, request)


async def test_a_server_without_the_flag_says_which_one_it_lacks() -> None:
    async with server_of() as (engine, wire):
        assert engine.info().records == frozenset(Replay) and not engine.info().unrecorded
        wire.layers = 0
        await engine.start()
        fault = engine.info().why_unrecorded({Replay.EXPERTS})
        assert fault is not None and f"start the server {engine.url} with --enable-return-routed-experts" in fault[1]
        assert engine.info().records == {Replay.KEPT, Replay.TOP_LOGPROBS}


async def test_a_dense_model_records_no_experts_and_needs_none() -> None:
    async with server_of(layers=DENSE) as (engine, _):
        assert engine.info().dense and engine.info().why_unrecorded(Replay) is None


@contextlib.asynccontextmanager
async def pool_of(live: Sequence[LiveWire], replay: frozenset[Replay] = frozenset()) -> AsyncIterator[Pool]:
    pool = Pool(
        [each.url for each in live],
        connect(VOCABULARY, None, layers=LAYERS),
        start_timeout_s=5.0,
        check_s=CHECK_S,
        replay=replay,
    )
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def test_a_pool_records_what_each_of_its_servers_records() -> None:
    async with wires(2) as live:
        live[0].wire.layers = 3
        async with pool_of(live) as pool:
            assert pool.info().records == {Replay.KEPT, Replay.TOP_LOGPROBS}
            fault = pool.info().why_unrecorded({Replay.EXPERTS})
            assert fault is not None and live[1].url in fault[1]
            await pool.remove(live[1].url)
            assert pool.info().records == frozenset(Replay)


async def test_a_pool_that_has_to_record_experts_does_not_start_with_a_server_that_does_not() -> None:
    async with wires(2) as live:
        live[0].wire.layers = 3
        with pytest.raises(ConfigurationError, match=r"--replay experts: .*--enable-return-routed-experts"):
            async with pool_of(live, BOTH):
                pass


async def test_a_server_that_does_not_record_what_the_pool_has_to_joins_once_it_does() -> None:
    async with wires(2) as live:
        live[0].wire.layers = 3
        async with pool_of(live[:1], BOTH) as pool:
            with pytest.raises(InvalidRequest, match="--enable-return-routed-experts"):
                await pool.add(live[1].url)
            live[1].wire.layers = 3
            await pool.add(live[1].url)
            assert states(pool)[live[1].url] == "alive"


async def test_a_server_that_returns_without_its_flag_stays_out() -> None:
    async with wires(2) as live:
        for each in live:
            each.wire.layers = 3
        async with pool_of(live, BOTH) as pool:
            await live[1].kill()
            await until(lambda: states(pool)[live[1].url] == "ejected")
            await live[1].start()  # as a new process, without the flag
            failure = lambda: next(each["failure"] for each in pool.servers() if each["url"] == live[1].url)  # noqa: E731
            await until(lambda: "--enable-return-routed-experts" in (failure() or ""))
            assert pool.info().records == frozenset(Replay)
            live[1].wire.layers = 3
            await until(lambda: states(pool)[live[1].url] == "alive")


async def test_sampled_tokens_whose_rows_died_with_their_server_are_missing() -> None:
    async with wires(2, delay_s=0.01) as live:
        for each in live:
            each.wire.layers = 3
        async with pool_of(live) as pool:
            request = recording(40)
            reply = Recorded(request)
            reading = asyncio.create_task(AdminGate(pool).sample(request, reply.take))
            await until(lambda: len(reply.ids) >= 10)
            victim = next(w for w, shown in zip(live, pool.servers(), strict=True) if shown["in_flight"])
            await victim.kill()
            await reading
            other = live[1 - live.index(victim)].wire
            taken = len(other.asked[-1]) - len(PROMPT)
            assert taken >= 10 and len(reply.ids) == 40
            reply.check_sets()
            reply.check_experts(missing=range(len(PROMPT), len(PROMPT) + taken - 1))


async def test_a_pause_that_aborts_requests_loses_no_row_and_asks_for_none_twice() -> None:
    async with wires(1, delay_s=0.01) as live:
        live[0].wire.layers = 3
        async with pool_of(live) as pool:
            gate, request = AdminGate(pool), recording(30)
            reply = Recorded(request)
            reading = asyncio.create_task(gate.sample(request, reply.take))
            await until(lambda: len(reply.ids) >= 5)
            await gate.admin.pause(PauseMode.ABORT)
            sampled = len(reply.ids)
            await gate.admin.resume()
            await reading
            assert len(reply.ids) == 30
            reply.check_sets()
            reply.check_experts()
            starts = [asked["routed_experts_start_len"] for asked in live[0].wire.columns if asked]
            assert starts == [0, len(PROMPT) + sampled - 1]


@pytest.mark.parametrize("answers", [True, False])
async def test_a_turn_that_ends_before_its_reply_gets_its_experts_or_ends_without(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_server, "_LATE_S", 0.2)
    async with server_of(delay_s=0.01) as (engine, wire):
        wire.lacks_rows = not answers
        reply = Recorded(recording(400))

        def take(chunk: TokenChunk) -> FinishReason | None:
            assert len(reply.ids) < 5 or not chunk.ids, "no token comes after the end"
            reply.take(chunk)
            return FinishReason.STOP if len(reply.ids) >= 5 else None

        assert await engine.sample(reply.request, take) is FinishReason.STOP
        await until(lambda: not wire.engine.running)
        if answers:
            reply.check_sets()
            reply.check_experts()
        else:
            assert reply.missing()["routed_experts"] == len(PROMPT) + len(reply.ids) - 1
