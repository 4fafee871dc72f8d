"""Images for vLLM servers: found out at start, sent beside ids, and every turn runs on exactly our ids."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from proxy.engine.contract import complete, request_for
from proxy.engine.interface import Capability, PauseMode
from proxy.engine.servers.sent_images import Eyes, SentImages
from proxy.engine.servers.vllm_server import VllmServer
from proxy.engine.servers.vllm_wire import VllmReply
from proxy.engine.version_names import VersionNumbers
from proxy.prompt_ids import PromptIds
from proxy.types import ids_of
from tests.engines.gates import AdminGate
from tests.engines.pictures import asks, drawn
from tests.engines.scripts import VOCABULARY, following
from tests.engines.spans import around
from tests.engines.wire import IMAGE, VllmWire, serving_wire
from tokengrove.errors import EngineFailed, InvalidRequest, UnsupportedParameter
from tokengrove.reasons import FinishReason, LogprobsOf

RED, PHOTO = drawn(1, 84, 56), drawn(2, 56, 56, "JPEG")
IDS, PLACED = around(RED, PHOTO)
TEXT = ids_of(range(40, 60))


@contextlib.asynccontextmanager
async def server(delay_s: float = 0.0, **wire_is: Any) -> AsyncIterator[tuple[VllmServer, VllmWire]]:
    async with serving_wire("vllm", delay_s) as (url, wire):
        for name, value in ({"sees": True} | wire_is).items():
            setattr(wire, name, value)
        engine = VllmServer(url, VOCABULARY, eyes=Eyes(SentImages(), (IMAGE,)))
        await engine.start()
        yield engine, wire
        await engine.close()


@pytest.mark.parametrize("numbers", [True, False], ids=["numbers", "names"])
async def test_a_prompt_goes_with_one_placeholder_for_each_image(numbers: bool) -> None:
    async with server(numbers=numbers) as (engine, wire):
        assert Capability.IMAGES in engine.info().capabilities and not engine.blind
        request = replace(asks(IDS, PLACED, (RED, PHOTO), 8), top_logprobs=2, stop_token_ids=(7,))
        reply = await complete(engine, request)
        assert reply.ids == following(IDS, 8, stops=(7,))
        assert all(len(top) == 2 for top in reply.top_logprobs)
        (body,) = wire.bodies
        assert body["token_ids"] == [*range(40, 50), IMAGE, *range(50, 55), IMAGE, *range(50, 55)]
        assert wire.pictures[0].startswith(RED.data) and wire.pictures[1].startswith(b"\x89PNG")
        assert body["return_token_ids"] is True and body["sampling_params"]["logprobs"] == 3
        assert body["sampling_params"]["stop_token_ids"] == [7]


async def test_without_top_logprobs_only_the_logprob_of_the_sampled_token_is_told() -> None:
    async with server() as (engine, _):
        reply = await complete(engine, asks(IDS, PLACED, (RED, PHOTO), 3))
        assert reply.ids == following(IDS, 3) and len(reply.logprobs) == 3 and not any(reply.top_logprobs)


@pytest.mark.parametrize(
    ("wire_is", "why"),
    [
        ({"takes_parts": None}, "openapi"),
        ({"takes_parts": False}, "newer vLLM"),
        ({"sees": False}, "not a multimodal model"),
        ({"scale_out": False}, "--enable-scale-out"),
    ],
)
async def test_a_server_that_cannot_says_so_at_start_and_refuses_images(wire_is: dict[str, Any], why: str) -> None:
    async with server(**wire_is) as (engine, wire):
        assert Capability.IMAGES not in engine.info().capabilities and why in engine.blind
        with pytest.raises(UnsupportedParameter, match=why):
            await complete(engine, asks(IDS, PLACED, (RED, PHOTO), 4))
        assert (await complete(engine, request_for(TEXT, 4))).ids == following(TEXT, 4)
        assert not wire.pictures


async def test_a_model_that_does_not_see_is_asked_nothing() -> None:
    async with serving_wire("vllm") as (url, wire):
        wire.takes_parts = wire.sees = True
        engine = VllmServer(url, VOCABULARY)
        await engine.start()
        assert Capability.IMAGES not in engine.info().capabilities and not engine.blind
        await engine.close()


async def test_other_ids_or_another_count_fail_the_turn_with_both_counts() -> None:
    async with server() as (engine, wire):
        ids, placed = around(RED, PHOTO, spare=2)
        with pytest.raises(EngineFailed) as raised:
            await complete(engine, asks(ids, placed, (RED, PHOTO), 4))
        assert str(len(ids)) in raised.value.message and str(len(IDS)) in raised.value.message
        wire.encodes = lambda ids: [41, *ids[1:]]
        with pytest.raises(EngineFailed, match="other tokens"):
            await complete(engine, asks(IDS, PLACED, (RED, PHOTO), 4))


async def test_a_server_that_does_not_say_which_ids_it_runs_on_fails_the_turn() -> None:
    async with server(says_ids=False) as (engine, _):
        with pytest.raises(EngineFailed, match="does not say which ids"):
            await complete(engine, asks(IDS, PLACED, (RED, PHOTO), 4))


async def test_placeholders_are_never_sampled() -> None:
    async with server() as (engine, wire):
        await complete(engine, asks(IDS, PLACED, (RED, PHOTO), 2))
        await complete(engine, request_for(TEXT, 2))
        assert [body["sampling_params"]["logit_bias"] for body in wire.bodies] == [{str(IMAGE): -100.0}] * 2


async def test_a_request_that_a_pause_ends_goes_on_with_its_images() -> None:
    async with server(0.005) as (engine, wire):
        gate = AdminGate(engine)
        begun = asyncio.Event()
        running = asyncio.create_task(gate.read(asks(IDS, PLACED, (RED, PHOTO), 60), begun))
        await begun.wait()
        await gate.admin.pause(PauseMode.ABORT)
        await gate.admin.resume()
        assert (await running).ids == following(IDS, 60)
        assert len(wire.bodies) == 2 and len(wire.bodies[1]["content_parts"]) == 2


async def test_a_request_that_is_aborted_while_its_images_are_encoded_ends() -> None:
    async with server() as (engine, wire):
        reached, go = asyncio.Event(), asyncio.Event()

        class Slow(SentImages):
            async def urls(self, images: Any) -> list[bytes]:
                reached.set()
                await go.wait()
                return await super().urls(images)

        engine._eyes = Eyes(Slow())
        request = asks(IDS, PLACED, (RED, PHOTO), 4)
        running = asyncio.create_task(complete(engine, request))
        await reached.wait()
        await engine.abort(request.request_id)
        go.set()
        assert (await running).finish is FinishReason.ABORT
        assert not wire.bodies


async def test_a_refusal_that_quotes_an_image_is_passed_on_without_it() -> None:
    async with server() as (engine, _):
        with pytest.raises(InvalidRequest, match="placeholders") as raised:
            await complete(engine, asks(ids_of([IMAGE]) + IDS, PLACED, (RED, PHOTO), 4))
        assert "base64" not in raised.value.message


SAID = {"prompt_token_ids": list(IDS)}


def seen() -> VllmReply:
    return VllmReply(VersionNumbers(), PromptIds(IDS), 0, LogprobsOf.RULE, says_ids=True)


def told(*tokens: int, logprob: float = -1.0) -> dict[str, Any]:
    return {"content": [{"token_id": token, "logprob": logprob} for token in tokens]}


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": [1, 2], "logprobs": told(1)},
        {"token_ids": [1], "logprobs": told(2)},
        {"token_ids": [1], "logprobs": None},
        {"token_ids": [1], "logprobs": told(1, logprob=-9999.0)},
        {"token_ids": [1], "logprobs": {"content": [{"token": "a", "logprob": -1.0}]}},
        {"token_ids": [1], "logprobs": {"content": [{"token_id": 1}]}},
        {"token_ids": [1], "logprobs": told(1), "finish_reason": "error"},
        {"token_ids": 1, "logprobs": told(1)},
        7,
    ],
)
def test_a_malformed_event_fails_the_turn(choice: Any) -> None:
    with pytest.raises(EngineFailed):
        seen().read([{"choices": [choice], **SAID}], 0, 0)


def test_ids_are_compared_in_the_first_event_that_has_tokens() -> None:
    reply = seen()
    assert reply.read([{"choices": []}], 0, 0) == []
    (chunk,) = reply.read([{"choices": [{"token_ids": [1], "logprobs": told(1)}], **SAID}], 0, 0)
    assert chunk.ids.tolist() == [1] and chunk.finish is None
    end = {"choices": [{"token_ids": [2], "logprobs": told(2), "finish_reason": "stop"}]}
    (last,) = reply.read([end, {"choices": [], "usage": {"prompt_tokens": len(IDS)}}], 0, 0)
    assert last.finish is FinishReason.STOP
