"""Experts and kept sets in the fields of each trainer, against shapes and values written out by hand."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.replayed import (
    KEPT_LOGPROBS,
    LAYERS,
    PER_TOKEN,
    SETS,
    VOCABULARY,
    experts,
    kept,
    replayed,
    two_turns,
)
from tests.samples import sample
from tokengrove.client import Sample
from tokengrove.client.adapters import (
    areal,
    miles,
    nemo_rl,
    prime_rl,
    replay,
    skyrl,
    slime,
    trl_rollout,
    verifiers,
    verl,
)
from tokengrove.client.tensors import Array
from tokengrove.errors import InvalidRequest

ROWS = experts(7)
KEPT = np.nan_to_num(KEPT_LOGPROBS).tolist()
Converter = Callable[..., Any]
ALL: dict[str, Converter] = {
    "skyrl": skyrl.generator_output,
    "slime": slime.fields,
    "miles": miles.fields,
    "prime_rl": prime_rl.training_samples,
    "verifiers": lambda samples, **more: [verifiers.message_nodes(each, **more) for each in samples],
}


def other() -> Sample:
    """A sample of one turn, [1, 9] and [2], with experts and a set."""
    columns = kept(3, {2: [2, 3, 4]})
    return sample(
        [1, 9], [2], session="t", routed_experts=experts(3, [2]), **columns, kept_logprobs=[np.nan, np.nan, -1.5]
    )


def filled(rows: Array) -> Array:
    """The rows, and the last of them again."""
    return np.concatenate([rows, rows[-1:]])


# What is shared


def test_a_row_is_missing_if_all_of_its_entries_have_the_largest_value() -> None:
    rows = experts(4, [1, 3])
    rows[2, 0, 0] = 255
    assert replay.missing_rows(rows).tolist() == [False, True, False, True]
    assert replay.missing_rows(experts(3, [0], np.uint16)).tolist() == [True, False, False]


@pytest.mark.parametrize("at", [0, 3, 5])
@pytest.mark.parametrize("convert", [*ALL.values(), verl.padded], ids=[*ALL, "verl"])
def test_a_missing_row_that_a_trained_token_needs_is_refused_or_its_column_left_out(
    convert: Converter, at: int
) -> None:
    broken = replayed(routed_experts=experts(7, [at, 6]))
    with pytest.raises(InvalidRequest, match=f"'s-1' has not all of its routed_experts: token {at} has no row"):
        convert([broken])
    left = str(convert([broken], on_missing="leave_out")).replace("routed_experts': None", "")
    assert "routed_experts" not in left
    assert "rollout_expert_indices" not in left.replace("rollout_expert_indices': None", "")


@pytest.mark.parametrize("convert", ALL.values(), ids=ALL)
def test_a_trained_token_without_a_set_is_refused_or_the_sets_left_out(convert: Converter) -> None:
    broken = replayed(**kept(7, {2: [3, 7], 3: [1, 4, 9], 6: [0, 6]}))
    with pytest.raises(InvalidRequest, match="kept sets: trained token 5 has none, the first of 1"):
        convert([broken])
    left = str(convert([broken], on_missing="leave_out"))
    assert "-0.75" in left  # the logprobs before truncation, which belong to no set
    assert "-0.125" not in left


def test_rows_after_the_last_trained_token_are_not_needed() -> None:
    rows = experts(7, [5, 6])
    assert replay.captured(replayed(routed_experts=rows), "leave_out") is None
    shorter = replayed(routed_experts=rows)
    shorter.loss_mask[6] = 0
    found = replay.captured(shorter)
    assert found is not None
    assert found.tolist() == ROWS[:5].tolist()


def test_a_sample_without_the_column_among_others_that_have_it_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="it has no such column"):
        slime.fields([replayed(), two_turns()])
    for fields in slime.fields([replayed(), two_turns()], on_missing="leave_out"):
        assert not {"rollout_routed_experts", "rollout_top_p_token_ids"} & set(fields)
    first, second = prime_rl.training_samples([replayed(), two_turns()], on_missing="leave_out")
    assert first["routed_experts"]["shape"] == [7, LAYERS, PER_TOKEN]
    assert (second["routed_experts"], second["sampling_mask"]) == (None, None)
    assert (first["logprobs"], second["logprobs"][2]) == (KEPT, -0.75)


@pytest.mark.parametrize("convert", ALL.values(), ids=ALL)
def test_samples_without_replay_columns_have_no_replay_fields(convert: Converter) -> None:
    found = str(convert([two_turns()]))
    assert "array" not in found
    assert "bytes" not in found


def test_the_logprob_of_a_token_without_a_restriction_is_the_one_before_truncation() -> None:
    columns = kept(7, {3: [1, 4, 9], 5: [5], 6: [0, 6]}, {2: []})
    logprobs = KEPT_LOGPROBS.copy()
    logprobs[2] = np.nan
    found = replay.sampled_logprobs(two_turns(**columns, kept_logprobs=logprobs))
    assert found.tolist() == [0, 0, -0.75, -0.25, 0, 0, -0.125]


def test_the_logprobs_of_a_turn_that_an_engine_reports_within_the_sets_are_those() -> None:
    logprobs = KEPT_LOGPROBS.copy()
    logprobs[5:] = np.nan
    told = replayed(kept_logprobs=logprobs)
    with pytest.raises(InvalidRequest, match="trained token 5 of sample 's-1' has no logprob within its kept set"):
        replay.sampled_logprobs(told)
    told.turns[1]["logprobs_of"] = "sampled"
    assert replay.sampled_logprobs(told).tolist() == [0, 0, -0.5, -0.25, 0, -1.25, -1.5]


@pytest.mark.parametrize(("largest", "dtype"), [(255, np.uint8), (256, np.int16), (32767, np.int16), (32768, np.int32)])
def test_expert_ids_are_in_a_dtype_that_torch_computes_with(largest: int, dtype: type[np.generic]) -> None:
    assert replay.torch_dtype([np.array([[[0, largest]]], np.uint16)]) is dtype


def test_a_set_stored_as_its_complement_needs_the_size_of_the_vocabulary() -> None:
    told = replayed(**kept(7, {3: [1, 4, 9], 5: [5], 6: [0, 6]}, {2: [0, 1]}))
    with pytest.raises(InvalidRequest, match="give 'vocab_size'"):
        slime.fields([told])
    [fields] = slime.fields([told], vocab_size=VOCABULARY)
    assert fields["rollout_top_p_token_ids"][:10].tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert fields["rollout_top_p_token_offsets"].tolist() == [0, 10, 13, 13, 14, 16]


# verl and uni-agent


def test_verls_experts_have_a_row_for_each_token_and_zeros_only_in_the_padding() -> None:
    batch = verl.padded([replayed(), other()], prompt_length=3, response_length=6).batch
    found = batch["routed_experts"]
    assert (found.dtype, found.shape) == (np.dtype(np.uint8), (2, 9, LAYERS, PER_TOKEN))
    assert found[0, 1:8].tolist() == filled(ROWS[:6]).tolist()
    assert found[1, 1:4].tolist() == filled(ROWS[:2]).tolist()
    assert not found[batch["attention_mask"] == 0].any()


def test_verls_experts_are_cut_with_the_tokens() -> None:
    batch = verl.padded([replayed()], prompt_length=1, response_length=2, on_too_long="truncate").batch
    assert batch["input_ids"].tolist() == [[2, 3, 4]]
    assert batch["routed_experts"][0].tolist() == ROWS[1:4].tolist()


def test_verls_batch_has_no_experts_if_one_sample_leaves_them_out() -> None:
    broken = replayed(routed_experts=experts(7, [2, 6]))
    assert "routed_experts" not in verl.padded([replayed(), broken], on_missing="leave_out").batch
    assert "routed_experts" not in verl.padded([two_turns()]).batch


def test_verls_jagged_experts_have_a_row_for_each_token() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tensordict")
    found = verl.jagged([replayed(), other()])["routed_experts"]
    assert [row.tolist() for row in found.unbind()] == [filled(ROWS[:6]).tolist(), filled(ROWS[:2]).tolist()]


# AReaL


def test_areals_experts_are_flat_and_end_before_the_last_token_of_the_turn() -> None:
    told = replayed()
    first, second = areal.routed_experts(told, 4), areal.routed_experts(told, 7)
    assert first is not None
    assert second is not None
    assert (first.dtype, first.shape) == (np.dtype(np.int32), (3, LAYERS * PER_TOKEN))
    assert first.tolist() == ROWS[:3].reshape(3, -1).tolist()
    assert second.tolist() == ROWS[:6].reshape(6, -1).tolist()
    assert areal.routed_experts(two_turns(), 4) is None


def test_a_turn_of_areal_that_lacks_a_row_is_refused_or_has_no_experts() -> None:
    broken = replayed(routed_experts=experts(7, [4, 6]))
    found = areal.routed_experts(broken, 4)
    assert found is not None
    with pytest.raises(InvalidRequest, match="token 4 has no row"):
        areal.routed_experts(broken, 7)
    assert areal.routed_experts(broken, 7, "leave_out") is None


# SkyRL


def test_skyrls_routes_are_a_prefix_and_its_support_has_the_sampled_token_first() -> None:
    output = skyrl.generator_output([replayed(), other()])
    assert output["prompt_token_ids"] == [[1, 2], [1, 9]]
    assert output["response_ids"] == [[3, 4, 8, 5, 6], [2]]
    assert output["loss_masks"] == [[1, 1, 0, 1, 1], [1]]
    assert output["rollout_logprobs"] == [KEPT[2:], [-1.5]]
    assert output["rewards"] == [1.5, 0.0]
    first, second = output["rollout_expert_indices"]
    assert (first.dtype, first.tolist(), second.tolist()) == (np.dtype(np.uint8), ROWS[:6].tolist(), ROWS[:2].tolist())
    support, one = output["rollout_sample_support"]
    assert support.dtype == np.int32
    assert support.tolist() == [[3, 7, -1], [4, 1, 9], [-1, -1, -1], [5, -1, -1], [6, 0, -1]]
    assert one.tolist() == [[2, 3, 4]]


def test_a_set_too_large_for_skyrls_support_is_refused_by_name() -> None:
    told = replayed(**kept(7, {3: [1, 4, 9], 5: [5], 6: [0, 6]}, {2: []}))
    with pytest.raises(InvalidRequest, match="kept set of 12 ids, and 'max_support' is 11"):
        skyrl.generator_output([told], vocab_size=VOCABULARY, max_support=11)
    [support] = skyrl.generator_output([told], vocab_size=VOCABULARY)["rollout_sample_support"]
    assert support[0].tolist() == [3, 0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("convert", ALL.values(), ids=ALL)
def test_sets_that_are_those_of_other_tokens_are_refused(convert: Converter) -> None:
    for columns in (
        kept(7, {**SETS, 3: [1, 9]}),
        kept(7, SETS | {4: [7]}),
        kept(7, {2: [3], 5: [5], 6: [6]}, {3: [4]}),
    ):
        with pytest.raises(InvalidRequest, match=r"the kept set of token [34] of sample 's-1' does not have it"):
            convert([replayed(**columns)], on_missing="leave_out")


# slime and Miles


@pytest.mark.parametrize("fields", [slime.fields, miles.fields], ids=["slime", "miles"])
def test_a_teachers_logprobs_are_those_of_the_response(fields: Converter) -> None:
    scores = np.array([np.nan, np.nan, -0.5, -1.5], np.float32)
    scored = sample([1, 9], [2, 3], session="t", ref_logprobs=scores)
    (made,) = fields([scored], teacher="ref")
    assert made["teacher_log_probs"] == [-0.5, -1.5]
    assert "teacher_log_probs" not in fields([scored])[0]
    with pytest.raises(InvalidRequest, match="no teacher 'other'"):
        fields([scored], teacher="other")
    partly = sample([1, 9], [2, 3], session="t", ref_logprobs=np.array([np.nan, np.nan, -0.5, np.nan], np.float32))
    with pytest.raises(InvalidRequest, match="did not score all trained tokens"):
        fields([partly], teacher="ref")


def test_a_teachers_logprobs_stand_where_each_trainer_reads_those_of_its_reference() -> None:
    scores = np.array([np.nan, np.nan, -0.5, -1.5], np.float32)
    scored = sample([1, 9], [2, 3], session="t", ref_logprobs=scores)
    other_one = sample([1], [2], session="u", ref_logprobs=np.array([np.nan, -0.25], np.float32))
    batch = verl.padded([scored, other_one], teacher="ref").batch["ref_log_prob"]
    assert (batch.dtype, batch.tolist()) == (np.float32, [[-0.5, -1.5], [-0.25, 0.0]])
    (made,) = prime_rl.training_samples([scored], teacher="ref")
    assert made["ref_logprobs"] == [0.0, 0.0, -0.5, -1.5]
    of_nodes = [node.get("reference_logprobs") for node in verifiers.message_nodes(scored, teacher="ref")]
    assert of_nodes == [None, [-0.5, -1.5]]
    assert "ref_log_prob" not in verl.padded([scored]).batch
    assert "ref_logprobs" not in prime_rl.training_samples([scored])[0]
    for call in (verl.padded, prime_rl.training_samples):
        with pytest.raises(InvalidRequest, match="no teacher 'other'"):
            call([scored], teacher="other")
    with pytest.raises(InvalidRequest, match="no teacher 'other'"):
        verifiers.message_nodes(scored, teacher="other")


def test_a_teachers_logprobs_are_those_of_trls_reference_model() -> None:
    scores = np.array([np.nan, np.nan, -0.5, -1.5], np.float32)
    scored = sample([1, 9], [2, 3], session="t", ref_logprobs=scores)
    batch = trl_rollout.training_batch([scored], advantages=[0.0], teacher="ref")
    assert batch["ref_per_token_logps"].tolist() == [[-0.5, -1.5]]
    assert "ref_per_token_logps" not in trl_rollout.training_batch([scored], advantages=[0.0])


def test_slimes_fields_have_experts_of_all_tokens_but_the_last_and_spans_of_kept_ids() -> None:
    fields, second = slime.fields([replayed(), other()])
    assert (fields["tokens"], fields["response_length"]) == ([1, 2, 3, 4, 8, 5, 6], 5)
    assert fields["loss_mask"] == [1, 1, 0, 1, 1]
    assert fields["rollout_log_probs"] == KEPT[2:]
    assert (fields["group_index"], second["group_index"], fields["rollout_id"], second["rollout_id"]) == (0, 1, 0, 1)
    rows, ids = fields["rollout_routed_experts"], fields["rollout_top_p_token_ids"]
    assert (rows.dtype, rows.tolist()) == (np.dtype(np.int32), ROWS[:6].tolist())
    assert (ids.dtype, ids.tolist()) == (np.dtype(np.int32), [3, 7, 1, 4, 9, 5, 0, 6])
    assert fields["rollout_top_p_token_offsets"].tolist() == [0, 2, 5, 5, 6, 8]
    assert fields["rollout_top_p_token_offsets"].dtype == np.int32


def test_slimes_span_of_a_token_without_a_restriction_is_empty() -> None:
    [fields] = slime.fields([replayed(**kept(7, {3: [1, 4, 9], 5: [5], 6: [0, 6]}, {2: []}))])
    assert fields["rollout_top_p_token_offsets"].tolist() == [0, 0, 3, 3, 4, 6]


def test_miless_mask_has_the_token_itself_where_nothing_was_sampled_and_all_ids_without_a_restriction() -> None:
    told = replayed(**kept(7, {3: [1, 4, 9], 5: [5], 6: [0, 6]}, {2: []}))
    with pytest.raises(InvalidRequest, match="vocab_size"):
        miles.fields([told])
    [fields] = miles.fields([told], vocab_size=VOCABULARY)
    mask = fields["rollout_sampling_mask"]
    assert (mask["ids"].dtype, mask["offsets"].dtype) == (np.dtype(np.int32), np.dtype(np.int64))
    rows = [row.tolist() for row in np.split(mask["ids"], mask["offsets"][1:-1])]
    assert rows == [list(range(VOCABULARY)), [1, 4, 9], [8], [5], [0, 6]]
    assert fields["rollout_log_probs"] == KEPT[2:]
    assert "rollout_id" not in fields


# prime-rl and verifiers


@dataclass
class Struct:
    """Stands for prime-rl's structs: a class with keyword arguments."""

    data: bytes = b""
    shape: list[int] | None = None
    dtype: str = ""
    ids: bytes = b""
    counts: bytes = b""


def test_prime_rls_columns_have_a_row_and_a_count_for_each_token() -> None:
    [fields] = prime_rl.training_samples([replayed()], env_name="maze")
    routed, mask = fields["routed_experts"], fields["sampling_mask"]
    assert (routed["shape"], routed["dtype"]) == ([7, LAYERS, PER_TOKEN], "uint8")
    rows = np.frombuffer(routed["data"], routed["dtype"]).reshape(routed["shape"])
    assert rows.tolist() == filled(ROWS[:6]).tolist()
    assert np.frombuffer(mask["counts"], np.int32).tolist() == [0, 0, 2, 3, 0, 1, 2]
    assert np.frombuffer(mask["ids"], np.int32).tolist() == [3, 7, 1, 4, 9, 5, 0, 6]
    assert (fields["mask"], fields["logprobs"]) == ([False, False, True, True, False, True, True], KEPT)
    assert (fields["env_name"], fields["advantages"]) == ("maze", None)


def test_prime_rls_temperatures_are_those_of_the_turns_and_its_structs_are_made_on_request() -> None:
    told = replayed(advantages=[0.5])
    told.turns[1]["sampling"] = {"temperature": 0.25}
    types = SimpleNamespace(TrainingSample=dict, RoutedExperts=Struct, SamplingMask=Struct)
    [made] = prime_rl.training_samples([told], types=types)
    assert made["temperatures"] == [1, 1, 1, 1, 1, 0.25, 0.25]
    assert made["advantages"] == [0, 0, 0.5, 0.5, 0, 0.5, 0.5]
    assert (made["routed_experts"].shape, made["sampling_mask"].counts[:4]) == ([7, 3, 2], b"\0\0\0\0")


def test_all_experts_of_a_batch_of_prime_rl_have_one_dtype() -> None:
    wide = replayed(routed_experts=experts(7, [6], np.uint16) + np.uint16(300))
    wide.extra["routed_experts"][6] = 65535
    assert [each["routed_experts"]["dtype"] for each in prime_rl.training_samples([replayed(), wide])] == ["int16"] * 2


def decoded(entry: dict[str, Any]) -> list[Any]:
    found: list[Any] = np.frombuffer(entry["data"], entry["dtype"]).reshape(entry["shape"]).tolist()
    return found


def test_the_nodes_of_verifiers_have_the_rows_of_their_tokens_and_the_sets_of_their_trained_tokens() -> None:
    asked, first, second = verifiers.message_nodes(replayed())[:3]
    last = verifiers.message_nodes(replayed())[3]
    nodes = [asked, first, second, last]
    assert [node["token_ids"] for node in nodes] == [[1, 2], [3, 4], [8], [5, 6]]
    assert [node["parent"] for node in nodes] == [None, 0, 1, 2]
    assert [node["sampled"] for node in nodes] == [False, True, False, True]
    assert [node["logprobs"] for node in nodes] == [[], [-0.5, -0.25], [], [0, -0.125]]
    assert np.concatenate([node["routed_experts"] for node in nodes]).tolist() == filled(ROWS[:6]).tolist()
    assert [decoded(node["sampling_mask"]["counts"]) for node in (first, last)] == [[2, 3], [1, 2]]
    assert [decoded(node["sampling_mask"]["ids"]) for node in (first, last)] == [[3, 7, 1, 4, 9], [5, 0, 6]]
    assert "sampling_mask" not in asked


def test_the_nodes_of_verifiers_have_the_messages_of_the_export() -> None:
    told = replayed()
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}
    told.turns[0]["messages"] = [system, user, {"role": "assistant", "content": "b"}]
    told.turns[1]["messages"] = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    nodes = verifiers.message_nodes(told)
    assert [node["message"]["content"] for node in nodes] == ["Be brief.", "a", "b", "c", "d"]
    assert [node["token_ids"] for node in nodes] == [[], [1, 2], [3, 4], [8], [5, 6]]
    assert "routed_experts" not in nodes[0]


# NeMo-RL


def read(text: str) -> Array:
    """The experts of NeMo-RL's encoding, read as its own decoder does."""
    magic, dtype, shape, data = text.split(":", 3)
    assert magic == "nrlre1"
    return np.frombuffer(base64.b64decode(data, validate=True), dtype).reshape([int(size) for size in shape.split("x")])


def test_nemos_items_have_a_row_for_each_token_and_minus_one_in_missing_rows() -> None:
    first, second = nemo_rl.output_items(two_turns(routed_experts=experts(7, [1, 6])))
    assert (first["prompt_token_ids"], first["generation_token_ids"]) == ([1, 2], [3, 4])
    assert (second["prompt_token_ids"], second["generation_token_ids"]) == ([1, 2, 3, 4, 8], [5, 6])
    assert second["generation_log_probs"] == [-1.25, -1.5]
    rows = read(second["routed_experts"])
    assert (rows.dtype, rows.shape) == (np.dtype(np.int8), (7, LAYERS, PER_TOKEN))
    assert (rows[[1, 6]] == -1).all()
    assert rows[[0, 2, 3, 4, 5]].tolist() == ROWS[[0, 2, 3, 4, 5]].tolist()
    assert read(first["routed_experts"]).tolist() == rows[:4].tolist()


@pytest.mark.parametrize(("more", "dtype"), [(0, np.int8), (200, np.int16), (40000, np.int32)])
def test_nemos_experts_are_in_the_smallest_signed_dtype(more: int, dtype: type[np.generic]) -> None:
    rows = experts(7, (), np.uint16) + np.uint16(more)
    rows[6] = 65535
    found = nemo_rl.signed(two_turns(routed_experts=rows))
    assert found is not None
    assert found.dtype == dtype
    assert found[:6].tolist() == rows[:6].tolist()
    assert (found[6] == -1).all()


def test_a_turn_that_another_sample_trains_has_no_item_of_nemo() -> None:
    told = two_turns()
    told.loss_mask[2:4] = 0
    [item] = nemo_rl.output_items(told)
    assert (item["prompt_token_ids"], item["generation_token_ids"]) == ([1, 2, 3, 4, 8], [5, 6])
    assert "routed_experts" not in item
    told.loss_mask[5] = 0
    with pytest.raises(InvalidRequest, match="trains only a part of turn 's-1'"):
        nemo_rl.output_items(told)


# TRL


def test_trls_batch_has_replay_columns_on_request() -> None:
    pytest.importorskip("torch")
    batch = trl_rollout.training_batch([replayed(), other()], advantages=[1.0, 0.0], replayed=["experts", "kept"])
    rows = batch["routed_experts"].numpy()
    assert (rows.dtype, rows.shape) == (np.dtype(np.int16), (2, 7, LAYERS, PER_TOKEN))
    assert rows[0, :6].tolist() == ROWS[:6].tolist()
    assert rows[1, :2].tolist() == ROWS[:2].tolist()
    assert (rows[0, 6] == -1).all()
    assert (rows[1, 2:] == -1).all()
    assert batch["kept_ids"][0].tolist() == [[3, 7, -1], [4, 1, 9], [-1, -1, -1], [5, -1, -1], [6, 0, -1]]
    assert batch["kept_ids"][1].tolist() == [[2, 3, 4], *[[-1] * 3] * 4]
    assert batch["sampling_per_token_logps"][0].tolist() == KEPT[2:]
    plain = trl_rollout.training_batch([replayed()], advantages=[1.0])
    assert "routed_experts" not in plain
    assert plain["sampling_per_token_logps"][0].tolist() == [-0.75, -1.0, 0, -1.25, -1.5]


def test_trls_batch_refuses_columns_that_the_samples_do_not_have() -> None:
    pytest.importorskip("torch")
    for column, message in (("experts", "no routed experts"), ("kept", "no kept sets with logprobs")):
        with pytest.raises(InvalidRequest, match=message):
            trl_rollout.training_batch([two_turns()], advantages=[1.0], replayed=[column])  # type: ignore[list-item]
