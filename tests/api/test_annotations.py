"""What trainers tell of the tokens that they trained: stored once, by token, trainer, step and name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxy.api import annotation_endpoints
from tests.support import Server, says, serving, user
from tokengrove.client import AsyncClient
from tokengrove.errors import AnnotatedOtherwise


async def played(server: Server, session: str = "s") -> list[Any]:
    """Two turns, of which the second continues the first; the samples of their session."""
    first = await server.answer([user("a")], session)
    await server.chat([user("a"), first, user("b")], session)
    await server.ok(f"/{session}/rl/end_session", {})
    return await server.export(session)


def body(samples: list[Any], streams: dict[str, Any], step: int = 7, **more: Any) -> dict[str, Any]:
    turns = [
        {"turns": sample["turns"], "loss_mask": sample["loss_mask"], "streams": streams, **more} for sample in samples
    ]
    return {"trainer": "grpo", "step": step, "samples": turns}


async def parts(server: Server, session: str = "s") -> list[Any]:
    response = await server.http.get(f"/rl/sessions/{session}/annotations")
    assert response.status_code == 200, response.text
    return [{**turn, **part} for turn in response.json()["turns"] for part in turn["parts"]]


async def test_a_trainer_tells_of_the_tokens_of_a_sample_and_reads_it_back(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        (sample,) = await played(server)
        trained = np.flatnonzero(sample["loss_mask"])
        logprobs = np.array(sample["logprobs"])
        logprobs[trained[0]] += 0.5
        masked = [bool(at == trained[1]) for at in range(len(sample["input_ids"]))]
        answer = await server.ok(
            "/trajectories/annotate", body([sample], {"logprobs": logprobs.tolist(), "is_masked": masked})
        )
        assert answer == {"turns": 2, "new": 2}
        first, second = sorted(await parts(server), key=lambda part: part["kl"], reverse=True)
        assert (first["trainer"], first["step"], first["masked"], second["masked"]) == ("grpo", 7, 1, 0)
        assert first["tokens"] + second["tokens"] == len(trained)
        assert first["kl"] == pytest.approx((np.expm1(0.5) - 0.5) / first["tokens"], rel=1e-5)
        assert first["largest_ratio"] == pytest.approx(np.exp(0.5), rel=1e-5)
        assert second["kl"] == pytest.approx(0.0, abs=1e-12)


async def test_the_streams_of_a_turn_have_a_value_for_each_token_of_its_output(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        (sample,) = await played(server)
        values = [at / 4 for at in range(len(sample["input_ids"]))]
        await server.ok("/trajectories/annotate", body([sample], {"entropy": values}, scalars={"loss": 0.125}))
        for number, turn in enumerate(sample["turns"]):
            shown = (await server.http.get(f"/rl/sessions/s/interactions/{number}?include=annotations")).json()
            (told,) = shown["annotations"]
            assert told["streams"] == {"entropy": values[slice(*turn["span"])]}
            assert told["scalars"] == ({"loss": 0.125} if number == 1 else {})
            assert (told["trainer"], told["step"]) == ("grpo", 7)
        asked = {"trainer": "grpo", "step": 7, "stream": "entropy"}
        shown = (await server.http.get("/rl/sessions/s/annotations", params=asked)).json()
        spans = {turn["interaction_id"]: values[slice(*turn["span"])] for turn in sample["turns"]}
        assert shown["values"] == spans
        assert [turn["streams"] for turn in shown["turns"]] == [["entropy"]] * 2
        assert (await server.http.get("/rl/sessions/s/annotations", params={**asked, "step": 8})).json()["values"] == {}
        refused = await server.http.get("/rl/sessions/s/annotations", params={"trainer": "grpo"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "step")


async def test_a_repeated_call_stores_nothing_and_another_value_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        samples = await played(server)
        given = body(samples, {"logprobs": samples[0]["logprobs"]}, scalars={"loss": 0.25})
        assert (await server.ok("/trajectories/annotate", given))["new"] == 2
        before = await parts(server)
        assert await server.ok("/trajectories/annotate", given) == {"turns": 2, "new": 0}
        assert await parts(server) == before
        for other in (
            body(samples, {"logprobs": [value - 1 for value in samples[0]["logprobs"]]}),
            body(samples, {}, scalars={"loss": 0.5}),
        ):
            refused = await server.post("/trajectories/annotate", other)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "annotated_otherwise"), refused.text
            assert "use another step or name" in refused.json()["error"]["message"]
        assert await parts(server) == before
        assert (await server.ok("/trajectories/annotate", {**given, "step": 8}))["new"] == 2
        assert [part["step"] for part in await parts(server)] == [7, 8, 7, 8]


async def test_streams_of_later_calls_are_added_to_the_sums(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        (sample,) = await played(server)
        every = len(sample["input_ids"])
        await server.ok("/trajectories/annotate", body([sample], {"logprobs": sample["logprobs"]}))
        await server.ok("/trajectories/annotate", body([sample], {"is_clipped": [True] * every}))
        found = await parts(server)
        assert (
            sum(part["clipped"] for part in found) == sum(part["tokens"] for part in found) == sum(sample["loss_mask"])
        )
        assert all(part["compared"] == part["tokens"] for part in found)


async def test_values_of_tokens_that_the_loss_mask_leaves_out_are_not_stored(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        (sample,) = await played(server)
        start, end = sample["turns"][1]["span"]
        values = [at / 4 for at in range(len(sample["input_ids"]))]
        only = [int(at == end - 1) for at in range(len(values))]
        given = body([{**sample, "loss_mask": only}], {"entropy": values})
        assert await server.ok("/trajectories/annotate", given) == {"turns": 1, "new": 1}
        shown = (await server.http.get("/rl/sessions/s/interactions/1?include=annotations")).json()["annotations"]
        assert shown[0]["streams"] == {"entropy": [None] * (end - 1 - start) + [values[end - 1]]}
        assert (await server.http.get("/rl/sessions/s/interactions/0?include=annotations")).json()["annotations"] == []
        assert [(part["first"], part["tokens"]) for part in await parts(server)] == [(0, 1)]


async def test_a_call_with_one_wrong_sample_stores_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["one", "two"] * 2)) as server:
        samples = [*await played(server), *await played(server, "other")]
        given = body(samples[:1], {"logprobs": samples[0]["logprobs"]})
        wrong = {**given["samples"][0], "turns": [{"interaction_id": "chatcmpl-0", "span": [0, 1]}]}
        refused = await server.post("/trajectories/annotate", {**given, "samples": [*given["samples"], wrong]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "samples[1].turns")
        assert await parts(server) == []


def wrong_samples() -> list[Any]:
    turn = {"interaction_id": "x", "span": [0, 2]}
    streams = {"streams": {"logprobs": [0.0, 0.0]}}
    return [
        ({"step": 1}, "samples"),
        ({"samples": []}, "step"),
        ({"step": -1, "samples": []}, "step"),
        ({"step": 1, "samples": []}, "samples"),
        ({"step": 1, "samples": [{}], "trainer": "a b"}, "trainer"),
        ({"step": 1, "samples": [{"turns": [], **streams}]}, "samples[0]"),
        ({"step": 1, "samples": [{"turns": [turn]}]}, "samples[0]"),
        ({"step": 1, "samples": [{"turns": [{"span": [0, 2]}], **streams}]}, "samples[0].turns[0].interaction_id"),
        ({"step": 1, "samples": [{"turns": [{**turn, "span": [2, 0]}], **streams}]}, "samples[0].turns[0].span"),
        ({"step": 1, "samples": [{"turns": [{**turn, "span": [0, 3]}], **streams}]}, "samples[0]"),
        ({"step": 1, "samples": [{"turns": [turn], **streams, "loss_mask": [1]}]}, "samples[0]"),
        ({"step": 1, "samples": [{"turns": [turn], "streams": {"a b": [0, 0]}}]}, "samples[0].streams"),
        ({"step": 1, "samples": [{"turns": [turn], "streams": {"a": [0, "1"]}}]}, "samples[0].streams.a"),
        ({"step": 1, "samples": [{"turns": [turn], "streams": {"a": [0, 1e39]}}]}, "samples[0].streams.a"),
        ({"step": 1, "samples": [{"turns": [turn], "scalars": {"a": None}}]}, "samples[0].scalars.a"),
        ({"step": 1, "samples": [{"turns": [turn], **streams, "stream": {}}]}, "samples[0].stream"),
    ]


@pytest.mark.parametrize(("given", "param"), wrong_samples())
async def test_a_wrong_field_is_named(tmp_path: Path, given: dict[str, Any], param: str) -> None:
    async with serving(tmp_path, says()) as server:
        refused = await server.post("/trajectories/annotate", given)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


async def test_more_tokens_than_a_turn_sampled_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        (sample,) = await played(server)
        turn = {"interaction_id": sample["interaction_ids"][0], "span": [0, 20]}
        given = {"step": 1, "samples": [{"turns": [turn], "streams": {"a": [0] * 20}}]}
        refused = await server.post("/trajectories/annotate", given)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "samples[0].turns")
        assert "but it sampled" in refused.json()["error"]["message"]


async def test_a_call_that_would_hold_too_many_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        samples = await played(server)
        given = body(samples, {"a": [1.0] * len(samples[0]["input_ids"])})
        monkeypatch.setattr(annotation_endpoints, "_MOST_HELD", sum(samples[0]["loss_mask"]) - 1)
        refused = await server.post("/trajectories/annotate", given)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "samples")
        assert "fewer samples" in refused.json()["error"]["message"]
        monkeypatch.setattr(annotation_endpoints, "_MOST_HELD", sum(samples[0]["loss_mask"]))
        assert (await server.ok("/trajectories/annotate", given))["new"] == 2


async def test_two_values_of_one_token_in_one_call_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        (sample,) = await played(server)
        first, second = body([sample] * 2, {"a": [0.5] * len(sample["input_ids"])})["samples"]
        second = {**second, "streams": {"a": [0.25] * len(sample["input_ids"])}}
        refused = await server.post("/trajectories/annotate", {"step": 1, "samples": [first, second]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "annotated_otherwise")


@pytest.mark.parametrize("layout", ["concat", "individual", "tree", "padded"])
@pytest.mark.parametrize("format", ["npz", "json"])
async def test_the_client_tells_of_samples_of_each_layout(tmp_path: Path, layout: Any, format: Any) -> None:
    padding: Any = {"prompt_length": 64, "response_length": 24, "on_too_long": "truncate"}
    async with serving(tmp_path, says("one", "two")) as server, AsyncClient(app=server.app) as client:
        await played(server)
        found = await client.export(
            session_id="s", layout=layout, format=format, **(padding if layout == "padded" else {})
        )
        apart = [sample.logprobs.astype(np.float64) - 0.25 for sample in found.samples]
        scalars = {"advantage": [0.5 + at for at in range(len(found.samples))]}
        assert await client.annotate(found.samples, 3, {"logprobs": apart}, scalars, trainer="t") == 2
        assert await client.annotate(found.samples, 3, {"logprobs": apart}, scalars, trainer="t") == 0
        told = [part for turn in await client.annotations("s") for part in turn["parts"]]
        trained = sum(int((sample.loss_mask > 0).sum()) for sample in found.samples)
        assert sum(part["tokens"] for part in told) == sum(part["compared"] for part in told) == trained > 0
        for part in told:
            assert part["largest_ratio"] == pytest.approx(np.exp(0.25), rel=1e-5)
            assert part["kl"] == pytest.approx(np.expm1(-0.25) + 0.25, rel=1e-4)


@pytest.mark.parametrize("align", ["tokens", "next", "response", "trained"])
async def test_rows_of_each_alignment_reach_the_same_tokens(tmp_path: Path, align: Any) -> None:
    async with serving(tmp_path, says("one", "two")) as server, AsyncClient(app=server.app) as client:
        await played(server)
        (sample,) = (await client.export(session_id="s")).samples
        values = np.arange(len(sample.input_ids), dtype=np.float32)
        trained = np.flatnonzero(sample.loss_mask)
        padded = np.concatenate([values, np.full(9, 77.0, np.float32)])
        row = {"tokens": padded, "next": padded[1:], "response": padded[trained[0] :], "trained": values[trained]}[
            align
        ]
        await client.annotate([sample], 1, {"index": [row]}, align=align)
        with pytest.raises(AnnotatedOtherwise):
            await client.annotate([sample], 1, {"index": [values + 1]})
        assert await client.annotate([sample], 1, {"index": [values]}) == 0


async def test_a_sample_that_trains_only_a_span_of_an_output_tells_of_its_tokens(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a long answer of words")) as server, AsyncClient(app=server.app) as client:
        await server.chat([user("a")])
        await server.ok("/s/rl/mark", {"turn": 0, "trainable": True, "spans": [[2, 4], [6, 7]]})
        await server.ok("/s/rl/end_session", {})
        (sample,) = (await client.export(session_id="s")).samples
        start, end = sample.turns[0]["span"]
        assert np.flatnonzero(sample.loss_mask[start:end]).tolist() == [2, 3, 6]
        values = np.arange(len(sample.input_ids), dtype=np.float32)
        await client.annotate([sample], 1, {"index": [values]})
        shown = (await server.http.get("/rl/sessions/s/interactions/0?include=annotations")).json()["annotations"]
        (told,) = [each["streams"]["index"] for each in shown]
        assert told == [float(start + at) if at in (2, 3, 6) else None for at in range(end - start)]


@pytest.mark.filterwarnings("ignore:session s. 9 of 12 sampled tokens are not trained")
async def test_a_padded_sample_that_is_cut_tells_of_the_right_tokens(tmp_path: Path) -> None:
    keeps: Any = {"prompt_length": 64, "response_length": 3, "on_too_long": "truncate", "keep": "tail"}
    async with serving(tmp_path, says("a long answer of words")) as server, AsyncClient(app=server.app) as client:
        await server.chat([user("a")])
        await server.ok("/s/rl/end_session", {})
        (whole,) = (await client.export(session_id="s")).samples
        (cut,) = (await client.export(session_id="s", layout="padded", **keeps)).samples
        assert cut.turns[0]["output_start"] == sum(whole.loss_mask) - 3
        values = np.arange(sum(whole.loss_mask), dtype=np.float32)
        await client.annotate([whole], 1, {"index": [values]}, align="trained")
        assert await client.annotate([cut], 1, {"index": [values[-3:]]}, align="trained") == 0


async def test_a_trainers_key_may_claim_acknowledge_and_annotate_and_nothing_else(tmp_path: Path) -> None:
    keys = {"admin_key": "admin-key-0123456789", "trainer_key": "trainer-key-0123456789"}
    async with serving(tmp_path, says("one"), **keys) as server:
        admin = {"authorization": f"Bearer {keys['admin_key']}"}
        trainer = {"authorization": f"Bearer {keys['trainer_key']}"}
        started = await server.ok("/rl/start_session", {"session_id": "s"}, headers=admin)
        agent = {"authorization": f"Bearer {started['api_key']}"}
        await server.ok("/v1/chat/completions", {"messages": [user("a")]}, headers=agent)
        await server.ok("/s/rl/end_session", {}, headers=admin)
        claimed = await server.ok("/trajectories/claim", {"export": {}}, headers=trainer)
        (sample,) = claimed["samples"]
        given = body([sample], {"logprobs": sample["logprobs"]})
        assert (await server.ok("/trajectories/annotate", given, headers=trainer))["new"] == 1
        await server.ok("/trajectories/acknowledge", {"claim_id": claimed["claim_id"]}, headers=trainer)
        for path, sent in (
            ("/trajectories/export", {}),
            ("/rl/start_session", {"session_id": "t"}),
            ("/s/rl/set_reward", {"reward": 1.0}),
            ("/engine/pause_generation", {}),
            ("/v1/chat/completions", {"messages": [user("a")]}),
        ):
            refused = await server.post(path, sent, headers=trainer)
            assert refused.status_code in (401, 403), (path, refused.text)
        for path in (
            "/rl/sessions",
            "/rl/sessions/s",
            "/trajectories/steps",
            "/trajectories/mismatch",
            "/rl/statistics",
        ):
            assert (await server.http.get(path, headers=trainer)).status_code == 403, path
        for key in ({}, {"authorization": "Bearer another-key-0123456789"}, agent):
            assert (await server.post("/trajectories/annotate", given, headers=key)).status_code in (401, 403)


async def test_the_steps_of_trainers_and_the_turns_of_each(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["one", "two"] * 3)) as server, AsyncClient(app=server.app) as client:
        for at, session in enumerate(("x", "y", "z")):
            await played(server, session)
            samples = (await client.export(session_id=session)).samples
            masked = [np.arange(len(sample.input_ids)) % 2 for sample in samples]
            await client.annotate(samples, at // 2, {"is_masked": masked}, trainer="grpo")
            await client.annotate(samples, 9, {"logprobs": [sample.logprobs for sample in samples]}, trainer="critic")
        steps = await client.trainer_steps()
        assert [(step["trainer"], step["step"], step["sessions"], step["turns"]) for step in steps] == [
            ("critic", 9, 3, 6),
            ("grpo", 1, 1, 2),
            ("grpo", 0, 2, 4),
        ]
        assert [step["step"] for step in await client.trainer_steps("grpo", before=1)] == [0]
        assert (steps[0]["kl"], steps[0]["largest_ratio"], steps[1]["kl"]) == (0.0, 1.0, None)
        told = await client.trainer_step("grpo", 0)
        assert {turn["session_id"] for turn in told} == {"x", "y"}
        assert sum(part["masked"] for turn in told for part in turn["parts"]) == steps[2]["masked"] > 0
        pages = [await server.http.get("/trajectories/steps/critic/9", params={"limit": 4})]
        pages.append(
            await server.http.get(
                "/trajectories/steps/critic/9", params={"limit": 4, "cursor": pages[0].json()["cursor"]}
            )
        )
        assert [len(page.json()["turns"]) for page in pages] == [4, 2]
        assert (await server.http.get("/trajectories/steps/grpo/77")).status_code == 404


async def test_what_was_told_of_a_session_goes_with_it(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        samples = await played(server)
        given = body(samples, {"a": [1.0] * len(samples[0]["input_ids"])})
        await server.ok("/trajectories/annotate", given)
        await server.http.delete("/rl/sessions/s")
        assert await parts(server) == []
        assert (await server.http.get("/trajectories/steps")).json() == {"steps": []}
        refused = await server.post("/trajectories/annotate", given)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "samples[0].turns")
