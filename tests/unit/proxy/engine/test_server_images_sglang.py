"""Images for SGLang servers: which servers take them, what they are sent, and that they run on exactly our ids."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.contract import complete, request_for
from proxy.engine.create import create_engine
from proxy.engine.grammar import Grammar, GrammarPart
from proxy.engine.interface import Capability, PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.pool import Pool
from proxy.engine.servers.sent_images import Eyes, SentImages
from proxy.engine.servers.sglang_server import SglangServer
from proxy.settings import Settings
from proxy.types import ids_of
from tests.engines.gates import AdminGate
from tests.engines.pictures import asks, drawn
from tests.engines.pools import wires
from tests.engines.scripts import VOCABULARY, following
from tests.engines.spans import around
from tests.engines.wire import IMAGE, LiveWire, SglangWire, serving_wire
from tests.support import until
from tokengrove.errors import EngineFailed, InvalidRequest, ProxyError, UnsupportedParameter
from tokengrove.reasons import FinishReason

RED, PHOTO = drawn(1, 84, 56), drawn(2, 56, 56, "JPEG")
IDS, PLACED = around(RED, PHOTO)
TEXT = ids_of(range(40, 60))


def eyes() -> Eyes:
    return Eyes(SentImages(), (IMAGE,))


def asked(tokens: int = 8, **sampling: Any) -> GenerateRequest:
    request: GenerateRequest = asks(IDS, PLACED, (RED, PHOTO), tokens, **sampling)
    return request


@contextlib.asynccontextmanager
async def server(sees: bool | None = True, delay_s: float = 0.0) -> AsyncIterator[tuple[SglangServer, SglangWire]]:
    async with serving_wire("sglang", delay_s) as (url, wire):
        wire.sees = sees
        engine = SglangServer(url, VOCABULARY, eyes=eyes())
        await engine.start()
        yield engine, wire
        await engine.close()


@contextlib.asynccontextmanager
async def pool_of(*live: LiveWire) -> AsyncIterator[Pool]:
    opener = connect(VOCABULARY, None, eyes=eyes())
    pool = Pool([wire.url for wire in live], opener, start_timeout_s=5.0, check_s=0.02)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


@pytest.mark.parametrize("whole", [True, False])
async def test_a_prompt_goes_with_one_placeholder_for_each_image_and_is_counted_expanded(whole: bool) -> None:
    async with server() as (engine, wire):
        request = asked()
        request.whole = whole
        reply = await complete(engine, request)
        assert reply.ids == following(IDS, 8) and not engine.blind
        assert Capability.IMAGES in engine.info().capabilities
        assert wire.asked[-1] == [*range(40, 50), IMAGE, *range(50, 55), IMAGE, *range(50, 55)]
        assert wire.pictures[-2].startswith(RED.data) and wire.pictures[-1].startswith(b"\x89PNG")
        assert ("return_prompt_token_ids" in wire.bodies[-1]) is whole


async def test_the_proof_that_ids_stay_is_asked_for_once() -> None:
    async with server() as (engine, wire):
        await asyncio.gather(*(complete(engine, asked()) for _ in range(3)))
        proofs = [body for body in wire.bodies if body["rid"].startswith("proof")]
        assert len(proofs) == 1 and len(wire.bodies) == 4
        assert proofs[0]["sampling_params"]["max_new_tokens"] == 1 and proofs[0]["input_ids"].count(IMAGE) == 1


async def test_a_server_that_encodes_prompts_with_images_anew_is_refused_by_name() -> None:
    async with server() as (engine, wire):
        wire.encodes = lambda ids: [min(token, IMAGE) if token > 49 else token + 1 for token in ids]
        for _ in range(2):
            with pytest.raises(UnsupportedParameter, match="SGLANG_MM_AVOID_RETOKENIZE") as raised:
                await complete(engine, asked())
            assert engine.url in raised.value.message
        assert len(wire.bodies) == 1
        assert (await complete(engine, request_for(TEXT, 4))).ids == following(TEXT, 4)


async def test_a_server_that_cannot_say_which_ids_it_runs_on_is_refused() -> None:
    async with server() as (engine, wire):
        wire.sees = None  # such a server does not take the field
        with pytest.raises(UnsupportedParameter, match="does not say which ids"):
            await complete(engine, asked())


@pytest.mark.parametrize("spare", [-1, 2])
async def test_an_engine_with_another_count_of_tokens_fails_the_turn_with_both_counts(spare: int) -> None:
    async with server() as (engine, _):
        await complete(engine, asked())
        ids, placed = around(RED, PHOTO, spare=spare)
        with pytest.raises(EngineFailed) as raised:
            await complete(engine, asks(ids, placed, (RED, PHOTO), 4))
        assert str(len(ids)) in raised.value.message and str(len(IDS)) in raised.value.message


async def test_as_many_other_ids_fail_a_turn_that_comes_in_one_piece() -> None:
    async with server() as (engine, wire):
        await complete(engine, asked())
        wire.encodes = lambda ids: [41, *ids[1:]]
        request = asked()
        request.whole = True
        with pytest.raises(EngineFailed, match="other tokens"):
            await complete(engine, request)


@pytest.mark.parametrize(("sees", "why"), [(False, "does not see"), (None, "does not say")])
async def test_a_server_that_does_not_see_says_so_and_refuses_images(sees: bool | None, why: str) -> None:
    async with server(sees) as (engine, wire):
        assert Capability.IMAGES not in engine.info().capabilities and why in engine.blind
        with pytest.raises(UnsupportedParameter, match=why):
            await complete(engine, asked())
        assert not wire.bodies


async def test_a_model_that_does_not_see_is_asked_nothing_and_sent_nothing_new() -> None:
    async with serving_wire("sglang") as (url, wire):
        wire.sees = True
        engine = SglangServer(url, VOCABULARY)
        await engine.start()
        assert Capability.IMAGES not in engine.info().capabilities and not engine.blind
        await complete(engine, request_for(TEXT, 2))
        assert not wire.bodies
        await engine.close()


@pytest.mark.parametrize("named", ["model", "tokenizer"])
async def test_servers_are_asked_for_images_if_the_folder_of_the_tokenizer_sees(tmp_path: Path, named: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}, "image_token_id": IMAGE, "vocab_size": 700}))
    for has_processor in (False, True):
        if has_processor:
            (tmp_path / "preprocessor_config.json").write_text("{}")
        async with serving_wire("sglang") as (url, wire):
            wire.sees = True
            settings = Settings(engine=url, **{named: str(tmp_path)})
            pool = create_engine(settings, VOCABULARY)
            await pool.start()
            assert (Capability.IMAGES in pool.info().capabilities) is has_processor
            await pool.close()


async def test_placeholders_get_no_chance_in_any_turn_of_a_model_that_sees(monkeypatch) -> None:
    sent: list[dict[str, Any]] = []
    original = SglangServer._body
    monkeypatch.setattr(SglangServer, "_body", lambda *given, **more: sent.append(original(*given, **more)) or sent[-1])
    async with server() as (engine, _):
        await complete(engine, asked())
        text = request_for(TEXT, 2)
        text.sampling = text.sampling._replace(logit_bias=((5, 1.0), (IMAGE, 3.0)))
        await complete(engine, text)
    assert [body["sampling_params"]["logit_bias"] for body in sent] == [
        {str(IMAGE): -1e9},
        {"5": 1.0, str(IMAGE): -1e9},
    ]


async def test_each_weight_version_gets_images_of_its_own() -> None:
    async with server() as (engine, wire):
        await complete(engine, asked())
        await complete(engine, asked())
        await engine.update_weights("/weights", 1)
        await complete(engine, asked())
        hashes = [tuple(body["mm_hashes"]) for body in wire.bodies if "mm_hashes" in body]
        bytes_of = [tuple(body["image_data"]) for body in wire.bodies if "mm_hashes" in body]
        assert hashes[0] == hashes[1] != hashes[2] and len(set(hashes[0])) == 2
        assert bytes_of[0] == bytes_of[1] != bytes_of[2]


async def test_an_image_in_another_detail_is_another_one_to_the_server() -> None:
    async with server() as (engine, wire):
        for detail in ("", "low"):
            ids, placed = around(RED, detail=detail)
            await complete(engine, asks(ids, placed, (RED,), 4))
        first, low = [body["mm_hashes"] for body in wire.bodies if "mm_hashes" in body]
        assert first != low


async def test_requests_that_are_retracted_for_new_weights_go_on_with_images_that_these_see() -> None:
    async with server(delay_s=0.005) as (engine, wire):
        gate = AdminGate(engine)
        begun = asyncio.Event()
        running = asyncio.create_task(gate.read(asked(60), begun))
        text = asyncio.create_task(gate.read(request_for(TEXT, 60)))
        await begun.wait()
        await gate.admin.update_weights("/weights", 1, PauseMode.RETRACT)
        reply = await running
        assert reply.ids == following(IDS, 60) and set(reply.versions) == {0, 1}
        assert (await text).ids == following(TEXT, 60)
        first, rest = [body for body in wire.bodies if not body["rid"].startswith("proof")]
        assert first["mm_hashes"] != rest["mm_hashes"] and len(rest["input_ids"]) >= len(first["input_ids"]) + 20
        assert sum(prompt[:20] == TEXT.tolist() for prompt in wire.asked) == 1


async def test_images_go_to_another_server_when_one_is_lost() -> None:
    async with wires(2, delay_s=0.005) as live:
        for wire in live:
            wire.wire.sees = True
        async with pool_of(*live) as pool:
            await until(lambda: all(shown["state"] == "alive" for shown in pool.servers()))
            gate = AdminGate(pool)
            begun = asyncio.Event()
            running = asyncio.create_task(gate.read(asked(60), begun))
            await begun.wait()
            busy = next(wire for wire in live if any(not b["rid"].startswith("proof") for b in wire.wire.bodies))
            other = next(wire for wire in live if wire is not busy)
            await busy.kill()
            reply = await running
            assert reply.ids == following(IDS, 60)
            assert len(other.wire.bodies[-1]["image_data"]) == 2
            assert len(other.wire.bodies[-1]["input_ids"]) >= 20 + 20


async def test_a_pool_takes_images_only_if_all_of_its_servers_do(caplog) -> None:
    async with wires(2) as live:
        live[0].wire.sees = True
        async with pool_of(*live) as pool:
            await until(lambda: all(shown["state"] == "alive" for shown in pool.servers()))
            assert Capability.IMAGES not in pool.info().capabilities
            lines = [record for record in caplog.records if "takes no images" in record.getMessage()]
            assert len(lines) == 1
            await pool.remove(live[1].url)
            await until(lambda: len(pool.servers()) == 1)
            assert Capability.IMAGES in pool.info().capabilities
            assert (await complete(pool, asked())).ids == following(IDS, 8)


async def test_a_refusal_that_quotes_an_image_is_passed_on_without_it() -> None:
    async with server() as (engine, wire):
        await complete(engine, asked())
        wire.encodes = lambda ids: ids
        ids, placed = around(RED)
        with pytest.raises(InvalidRequest, match="placeholders") as raised:
            await complete(engine, asks(ids_of([IMAGE]) + ids, placed, (RED,), 4))
        assert "base64" not in raised.value.message and "(an image)" in raised.value.message


async def test_a_request_that_is_aborted_while_its_images_are_encoded_ends(monkeypatch) -> None:
    async with server() as (engine, wire):
        await complete(engine, asked())
        reached, go = asyncio.Event(), asyncio.Event()

        class Slow(SentImages):
            async def urls(self, images: Any) -> list[bytes]:
                reached.set()
                await go.wait()
                return await super().urls(images)

        assert engine._sight is not None
        engine._sight._images = Slow()
        request, count = asked(), len(wire.bodies)
        running = asyncio.create_task(complete(engine, request))
        await reached.wait()
        await engine.abort(request.request_id)
        go.set()
        assert (await running).finish is FinishReason.ABORT
        assert len(wire.bodies) == count and not engine._rids


async def test_an_image_that_is_nowhere_fails_its_turn_alone() -> None:
    async with server() as (engine, _):
        with pytest.raises(ProxyError, match="is not stored"):
            await complete(engine, asks(IDS, PLACED, (RED,), 4))
        assert (await complete(engine, asked())).ids == following(IDS, 8)


async def test_an_output_under_a_grammar_comes_whole_with_its_ids() -> None:
    async with server() as (engine, wire):
        request = asked()
        request.whole, request.grammar = True, Grammar(((GrammarPart(text="yes"),),))
        await complete(engine, request)
        assert wire.bodies[-1]["stream"] is False and wire.bodies[-1]["return_prompt_token_ids"] is True
