"""Layout forest, compared with the rows of layout concat and with a trie that looks at one token after the other."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from proxy.side_columns.columns import EXPERTS, KEPT
from proxy.trajectory.advantages import Groups, group_of
from proxy.trajectory.forest import Packer
from proxy.trajectory.forest_sample import ForestSample
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.trajectory.outline import outline
from proxy.trajectory.path_sample import PathSample
from proxy.trajectory.routes import by_route
from proxy.trajectory.scored_session import scored_session
from proxy.types import Interaction, PlacedImage, SessionRecord
from tests.interactions import interaction
from tests.side_columns import SHAPES, column_of, columns_of_all
from tokengrove.client.forest import PackedSequence, attention_mask, sequence_of
from tokengrove.client.readers.page import Page
from tokengrove.client.tally import Tally
from tokengrove.client.values import Sample, sample_of
from tokengrove.options.export import Baseline, Experts, Forest, Images, Layout, Merge, TurnCredit

PLACEHOLDER = 9
Session = tuple[SessionRecord, list[Interaction]]


@st.composite
def conversations(draw: st.DrawFn, session: str) -> list[Interaction]:
    """A tree of up to six turns of a vocabulary so small that most sessions begin alike. Some prompts show images."""
    nodes: list[Interaction] = []
    for at in range(draw(st.integers(0, 6))):
        parent = draw(st.sampled_from([None, *nodes]))
        prefix = parent.prompt_tokens + len(parent.output_ids) if parent and draw(st.integers(0, 4)) else 0
        suffix, output = (draw(st.lists(st.integers(0, 1), min_size=least, max_size=4)) for least in (1, 0))
        images = []
        if draw(st.integers(0, 3)) == 0:
            images = [PlacedImage(draw(st.sampled_from("ab")) * 64, prefix + len(suffix), 2, 56, 28, "")]
            suffix = [*suffix, PLACEHOLDER, PLACEHOLDER]
        name = f"{session}-{at}"
        made = interaction(
            name, parent=parent.id if parent else None, prefix=prefix, suffix=suffix, output=output, seq=at, version=at
        )
        made.session_id, made.images = session, tuple(images)
        made.trainable = draw(st.booleans())
        made.spans = ((0, 1),) if output and draw(st.booleans()) else ()
        made.reward = draw(st.sampled_from([None, 1.0, -0.5]))
        made.state_hash = draw(st.sampled_from([None, "x"]))
        made.logprobs = type(made.logprobs)("f", [-0.25 * (at + 1) - 0.5 * k for k in range(len(output))])
        made.token_rewards = tuple(float(k) for k in range(len(output))) if output and draw(st.booleans()) else None
        nodes.append(made)
    return nodes


@st.composite
def sessions(draw: st.DrawFn) -> list[Session]:
    found = []
    for number in range(draw(st.integers(1, 5))):
        group = draw(st.sampled_from([None, "g", "h"]))
        found.append((SessionRecord(f"s{number}", group_id=group), draw(conversations(f"s{number}"))))
    return sorted(found, key=lambda one: str(group_of(one[0].session_id, one[0].group_id)))


def laid_out(found: Sequence[Session], options: LayoutOptions) -> list[tuple[SessionRecord, list[PathSample]]]:
    groups = Groups()
    for record, turns in found:
        for route, own in by_route(turns).items():
            scored = scored_session(record, own, options)
            groups.add(group_of(record.session_id, record.group_id, route), scored.values(), scored.steps())
    return [(record, lay_out(record, turns, options, groups).paths) for record, turns in found]


def options_of(forest: Forest | None) -> LayoutOptions:
    layout = Layout.CONCAT if forest is None else Layout.FOREST
    compared = {"advantages": Baseline.GRPO, "step_advantages": Baseline.LEAVE_ONE_OUT}
    return LayoutOptions(layout=layout, forest=forest, drops_long=True, **compared)  # type: ignore[arg-type]


def packed(found: Sequence[Session], forest: Forest) -> tuple[list[ForestSample], dict[str, Any]]:
    options = options_of(forest)
    packer, made = Packer(options), []
    for record, rows in laid_out(found, options):
        made += packer.add(record, rows)
    return [*made, *packer.finish()], packer.counts()


def as_client(sample: ForestSample) -> PackedSequence:
    return sequence_of({**sample.labels(), **sample.columns()})


def keys(row: PathSample) -> list[Hashable]:
    """What must be equal for a position of rows to merge."""
    found: list[Hashable] = [("context", int(token), None) for token in row.arrays.input_ids]
    for image in row.images:
        for at in range(image.start, image.start + image.length):
            found[at] = ("image", image.digest, at - image.start)
    for placed in row.placements:
        if placed.start is not None:
            for at in range(len(placed.interaction.output_ids)):
                found[placed.start + at] = ("sampled", placed.interaction.id, at)
    return found


def prefixes(rows: Iterable[PathSample]) -> set[tuple[Hashable, ...]]:
    """The nodes of the trie of rows."""
    return {tuple(found[: at + 1]) for found in map(keys, rows) for at in range(len(found))}


def same(one: Sample, other: Sample) -> None:
    for name in Sample.__dataclass_fields__:
        first, second = getattr(one, name), getattr(other, name)
        if name == "extra":
            assert first.keys() - {"token_rewards"} == second.keys() - {"token_rewards"}
            for each in first:
                rare = (
                    np.zeros(len(one.input_ids)) if each == "token_rewards" else None
                )  # others of the sequence have it
                np.testing.assert_array_equal(first[each], second.get(each, rare), err_msg=each)
        elif isinstance(first, np.ndarray):
            assert first.dtype == second.dtype, name
            np.testing.assert_array_equal(first, second, err_msg=name)
        else:
            assert first == second, name


@given(sessions(), st.sampled_from([None, 6, 9, 14, 30]), st.sampled_from(Merge))
def test_the_samples_of_the_sequences_are_those_of_layout_concat(
    found: list[Session], most: int | None, merge: Merge
) -> None:
    made, _ = packed(found, Forest(max_tokens=most, merge=merge))
    rebuilt = {sample.interaction_id: sample for each in made for sample in as_client(each).samples()}
    assert len(rebuilt) == sum(len(each.rows) for each in made), "each sample is in one sequence"
    rows = {row.last.id: row for _, own in laid_out(found, options_of(None)) for row in own}
    whole = {name: row for name, row in rows.items() if most is None or len(row.arrays.input_ids) <= most}
    assert rebuilt.keys() == whole.keys()
    if whole.keys() != rows.keys():
        return  # dropped samples leave their tokens and weights to others
    for name, row in rows.items():
        same(rebuilt[name], sample_of(row.to_json()))


@given(sessions(), st.sampled_from(Merge))
def test_each_prefix_is_in_the_forest_once(found: list[Session], merge: Merge) -> None:
    made, counts = packed(found, Forest(merge=merge))
    nodes = 0
    for each in made:
        assert each.labels()["tokens"] == len(prefixes(each.rows))
        nodes += len(prefixes(each.rows))
    rows = [row for _, own in laid_out(found, options_of(None)) for row in own]
    assert counts["tokens"] == nodes
    assert counts["row_tokens"] == sum(len(row.arrays.input_ids) for row in rows)
    assert counts["merged_tokens"] == counts["row_tokens"] - nodes
    assert (counts["rows"], counts["repeated_tokens"]) == (len(rows), 0)
    alike = {tuple(r.arrays.input_ids[: at + 1].tolist()) for r in rows for at in range(len(r.arrays.input_ids))}
    if merge is Merge.ALL:
        assert sum(counts["unmerged_tokens"].values()) == nodes - len(alike)


@given(sessions(), st.sampled_from([None, 8, 20]), st.sampled_from(Merge))
def test_a_token_attends_to_itself_and_the_tokens_above_it(
    found: list[Session], most: int | None, merge: Merge
) -> None:
    for each in packed(found, Forest(max_tokens=most, merge=merge))[0]:
        sequence = as_client(each)
        seen = attention_mask(sequence)
        for token, parent in enumerate(sequence.parent.tolist()):
            above = [] if parent < 0 else np.flatnonzero(seen[parent]).tolist()
            assert np.flatnonzero(seen[token]).tolist() == [*above, token]
            assert sequence.position_ids[token] == len(above)


@given(sessions(), st.sampled_from([6, 9, 14, 30]), st.sampled_from(Merge))
def test_no_sequence_is_longer_than_asked_and_repeated_tokens_are_context(
    found: list[Session], most: int, merge: Merge
) -> None:
    made, counts = packed(found, Forest(max_tokens=most, merge=merge))
    assert all(each.labels()["tokens"] <= most for each in made)
    kept = [row for each in made for row in each.rows]
    trained = sum(int(each.columns()["loss_mask"].sum()) for each in made)
    assert trained == sum(int(row.arrays.loss_mask.sum()) for row in kept)
    groups: dict[Any, list[PathSample]] = {}
    for row in kept:
        session = row.session
        key = None if merge is Merge.ALL else group_of(session.session_id, session.group_id)
        groups.setdefault(key, []).append(row)
    once = sum(len(prefixes(rows)) for rows in groups.values())
    assert counts["tokens"] - counts["repeated_tokens"] == once
    assert counts["repeated_tokens"] == sum(each.labels()["repeated_tokens"] for each in made)


@given(sessions())
def test_values_of_samples_are_spread_over_the_tokens_that_they_train(found: list[Session]) -> None:
    for each in packed(found, Forest(merge=Merge.ALL))[0]:
        columns = each.columns()
        for row, path in zip(each.rows, each.paths, strict=True):
            trained = row.arrays.loss_mask > 0
            assert set(columns["advantages"][path[trained]]) <= {np.float32(row.weighting.advantage)}
            assert set(columns["rewards"][path[trained]]) <= {row.rewards[0]}
        context = columns["loss_mask"] == 0
        for name in ("advantages", "step_advantages", "rewards", "logprobs"):
            assert not columns[name][context].any()
        assert (columns["row_ids"][context] == -1).all()


@given(sessions(), st.sampled_from(Experts), st.data())
def test_each_token_has_the_side_columns_of_a_sample_with_it(
    found: list[Session], experts: Experts, data: st.DataObject
) -> None:
    """Its experts are those of the first sample that recorded them, or equal in all samples that share it."""
    forest, columns = Forest(merge=Merge.ALL, experts=experts), {}
    for number, (_, turns) in enumerate(found):
        kind = data.draw(st.integers(0, 1)) if number else 0
        columns |= columns_of_all(turns, {each.id: [at for at in range(9) if kind and at % 3 == 2] for each in turns})
    options = replace(options_of(forest), columns=SHAPES)
    packer, made = Packer(options), []
    for record, turns in found:
        made += packer.add(record, lay_out(record, turns, options, Groups(), columns=columns).paths)
    for each in [*made, *packer.finish()]:
        sequence = as_client(each)
        recorded: dict[int, list[Any]] = {}
        for row, path in zip(each.rows, each.paths, strict=True):
            side = row.side()
            for at, (token, values) in enumerate(zip(path.tolist(), side[EXPERTS].values, strict=True)):
                if not side[EXPERTS].missing[at]:
                    recorded.setdefault(token, []).append(values)
            trained = np.flatnonzero(row.arrays.loss_mask)
            counts = sequence.extra["kept_counts"]
            np.testing.assert_array_equal(counts[path[trained]], side[KEPT].counts[trained])  # type: ignore[index]
        for token, values in enumerate(sequence.extra[EXPERTS]):
            ways = recorded.get(token, [np.full_like(values, 255)])
            np.testing.assert_array_equal(values, ways[0])
            if experts is Experts.EQUAL:
                assert all((one == ways[0]).all() for one in ways)


def chat(session: str, prompt: Sequence[int], output: Sequence[int], group: str = "g") -> Session:
    made = interaction(f"{session}-0", suffix=prompt, output=output)
    made.session_id = session
    return SessionRecord(session, group_id=group), [made]


def test_a_group_has_its_prompt_once_and_equal_answers_apart() -> None:
    made, counts = packed([chat(f"s{at}", range(100), [7, 7, at]) for at in range(8)], Forest())
    (one,) = made
    assert one.columns()["input_ids"].tolist() == [*range(100), *[t for at in range(8) for t in (7, 7, at)]]
    assert one.columns()["parent"].tolist()[98:105] == [97, 98, 99, 100, 101, 99, 103]
    assert counts == {
        "sequences": 1,
        "rows": 8,
        "row_tokens": 824,
        "tokens": 124,
        "repeated_tokens": 0,
        "merged_tokens": 700,
        "unmerged_tokens": {"sampled": 14},
    }


def test_groups_are_packed_together_and_a_large_one_is_divided() -> None:
    small = [chat(f"a{at}", range(10), [at], "a") for at in range(2)] + [chat("b", range(5), [1], "b")]
    large = [chat(f"c{at}", range(10), [50, at], "c") for at in range(4)]
    made, counts = packed(small + large, Forest(max_tokens=20))
    assert [(each.labels()["group_ids"], each.labels()["tokens"]) for each in made] == [
        (["a", "b"], 18),
        (["c"], 18),
    ]
    made, counts = packed(small + large, Forest(max_tokens=14))
    found = [(each.labels()["group_ids"], each.labels()["tokens"], each.repeated) for each in made]
    assert found == [(["a"], 12, 0), (["b"], 6, 0), (["c"], 14, 0), (["c"], 14, 10)]
    assert (counts["tokens"], counts["repeated_tokens"], counts["sequences"]) == (46, 10, 4)


def test_other_images_and_other_routes_do_not_merge() -> None:
    found = []
    for at, digest in enumerate("aab"):
        record, (turn,) = chat(f"s{at}", [1, PLACEHOLDER, PLACEHOLDER, 2], [3])
        turn.images = (PlacedImage(digest * 64, 1, 2, 56, 28, ""),)
        found.append((record, [turn]))
    made, counts = packed(found, Forest())
    assert counts["tokens"] == 1 + 2 * 2 + 2 + 3
    assert counts["unmerged_tokens"] == {"images": 4, "sampled": 1}
    assert [image.digest[0] for image in made[0].images] == ["a", "b"]
    ids = made[0].columns()["input_ids"]
    assert all(ids[image.start] == PLACEHOLDER == ids[image.start + 1] for image in made[0].images)
    routed = [chat("s0", range(5), [1]), chat("s1", range(5), [2])]
    for (_, (turn,)), route in zip(routed, ("one", "two"), strict=True):
        turn.route = route
    assert len(packed(routed, Forest(merge=Merge.ALL))[0]) == 2


def test_a_dropped_sample_is_counted_and_its_tokens_have_a_reason() -> None:
    options = replace(options_of(Forest(max_tokens=5)))
    record, turns = chat("s", range(5), [1, 2])
    found = lay_out(record, turns, options, Groups())
    assert found.paths == [] and found.counts(options)["dropped_samples"] == 1
    assert found.counts(options)["untrained_tokens"] == {"too_long": 2}


def test_a_group_fills_a_sequence_and_a_too_long_one_begins_in_the_open_one() -> None:
    small = [chat("a", range(10), [1], "a"), chat("b", range(6), [1], "b")]
    (one,), _ = packed(small, Forest(max_tokens=18))
    assert (one.labels()["group_ids"], one.labels()["tokens"]) == (["a", "b"], 18)
    large = [chat(f"c{at}", range(10), [50, at], "c") for at in range(6)]
    made, _ = packed(small[1:] + large, Forest(max_tokens=20))
    found = [(each.labels()["group_ids"], each.labels()["tokens"], each.repeated) for each in made]
    assert found == [(["b", "c"], 19, 0), (["c"], 20, 10)]


def test_an_image_in_another_detail_does_not_merge() -> None:
    found = []
    for at, detail in enumerate(("", "low")):
        record, (turn,) = chat(f"s{at}", [1, PLACEHOLDER, PLACEHOLDER, 2], [3])
        turn.images = (PlacedImage("a" * 64, 1, 2, 56, 28, detail),)
        found.append((record, [turn]))
    made, counts = packed(found, Forest())
    assert counts["unmerged_tokens"] == {"images": 4}
    assert [image.detail for image in made[0].images] == ["", "low"]


def test_tokens_with_other_experts_are_apart_and_counted() -> None:
    found = [chat(f"s{at}", range(4), [5]) for at in range(2)]
    columns = {turn.id: column_of(at, turn) for at, (_, (turn,)) in enumerate(found)}
    options = replace(options_of(Forest(experts=Experts.EQUAL)), columns=SHAPES)
    packer = Packer(options)
    for record, turns in found:
        packer.add(record, lay_out(record, turns, options, Groups(), columns=columns).paths)
    packer.finish()
    assert packer.counts()["unmerged_tokens"] == {"sampled": 1, "experts": 4}


def test_turn_advantages_are_those_of_each_sample() -> None:
    found = []
    for at in range(3):
        record, (turn,) = chat(f"s{at}", range(3), [5, at])
        turn.reward, turn.state_hash = float(at), "x"
        found.append((record, [turn]))
    how = {"advantages": None, "turn_advantages": TurnCredit.GIGPO, "step_weight": 2.0}
    options = replace(options_of(Forest()), **how)
    packer = Packer(options)
    for record, rows in laid_out(found, options):
        packer.add(record, rows)
    (sequence,) = map(as_client, packer.finish())
    values = [-3.0, 0.0, 3.0]  # -1, 0 and 1 among the sessions, and twice this in the state
    np.testing.assert_allclose(
        sequence.extra["turn_advantages"], [0] * 3 + [v for v in values for _ in range(2)], atol=1e-4
    )
    np.testing.assert_allclose(
        [s.extra["turn_advantages"] for s in sequence.samples()], [[v] for v in values], atol=1e-4
    )


@given(sessions())
def test_samples_have_the_sets_of_the_tokens_that_they_train(found: list[Session]) -> None:
    columns = {}
    for _, turns in found:
        columns |= columns_of_all(turns, {each.id: [each.prompt_tokens] for each in turns[1:]})
    options = replace(options_of(Forest(merge=Merge.ALL)), columns=SHAPES)
    packer, rows = Packer(options), {}
    for record, turns in found:
        own = lay_out(record, turns, options, Groups(), columns=columns).paths
        rows |= {row.last.id: sample_of(row.to_json()) for row in own}
        packer.add(record, own)
    for sequence in map(as_client, packer.finish()):
        for made in sequence.samples():
            row = rows[made.interaction_id]
            for at in np.flatnonzero(row.loss_mask):
                assert kept_at(made, at) == kept_at(row, at)
                np.testing.assert_array_equal(made.extra["kept_logprobs"][at], row.extra["kept_logprobs"][at])
            for name in ("kept_ids", "kept_counts", "kept_logprobs", "top_token_ids", "top_logprobs"):
                np.testing.assert_array_equal(made.extra[name], row.extra[name], err_msg=name)
            assert {name: each["missing"] for name, each in made.extra["replay"].items() if name != EXPERTS} == {
                name: each["missing"] for name, each in row.extra["replay"].items() if name != EXPERTS
            }


def kept_at(sample: Sample, at: int) -> tuple[int, list[int]]:
    counts = sample.extra["kept_counts"]
    ends = np.cumsum(np.where(counts < 0, -counts - 1, counts))
    return int(counts[at]), np.split(sample.extra["kept_ids"], ends[:-1])[at].tolist()


def one_sequence(found: Sequence[Session], **more: Any) -> ForestSample:
    options = replace(options_of(Forest(merge=Merge.ALL)), **{k: v for k, v in more.items() if k != "recorded"})
    packer = Packer(options)
    for record, turns in found:
        packer.add(record, lay_out(record, turns, options, Groups(), columns=more.get("recorded", {})).paths)
    (made,) = packer.finish()
    return made


def test_a_sequence_has_images_only_if_asked_and_other_images_are_apart_all_the_same() -> None:
    found = []
    for at, digest in enumerate("ab"):
        record, (turn,) = chat(f"s{at}", [1, PLACEHOLDER, PLACEHOLDER], [3])
        turn.images = (PlacedImage(digest * 64, 1, 2, 56, 28, ""),)
        found.append((record, [turn]))
    made = one_sequence(found, images=Images.NONE)
    assert "images" not in made.labels() and made.labels()["tokens"] == 7


def test_unmasked_logprobs_of_samples_without_them_are_the_logprobs() -> None:
    found = [chat(f"s{at}", [1, 2], [5, at]) for at in range(2)]
    turn = found[0][1][0]
    turn.unmasked_logprobs = type(turn.logprobs)("f", [-3.0, -4.0])
    assert one_sequence(found).columns()["unmasked_logprobs"].tolist() == [0, 0, -3.0, -4.0, -0.5, -0.5]


def test_a_row_of_experts_is_missing_only_where_a_token_follows() -> None:
    short, long = chat("s0", [1, 2], []), chat("s1", [1, 2, 3], [4])
    columns = {turn.id: column_of(0, turn, [1]) for _, (turn,) in (short, long)}
    for found, missing in (([short], []), ([short, long], [[1, 2]])):
        made = one_sequence(found, columns=SHAPES, recorded=columns)
        assert made.labels()["replay"][EXPERTS]["missing"] == missing


def test_the_summary_of_an_export_counts_samples_and_tokens_of_sequences() -> None:
    record, (turn,) = chat("s0", range(4), [5])
    fork = interaction("s0-1", suffix=[0, 1, 2], output=[6, 7], seq=1)
    made, _ = packed([(record, [turn, fork]), chat("s1", range(4), [5])], Forest())
    tally = Tally()
    tally.count(Page([], {}, {}, sequences=[as_client(each) for each in made]), "forest")
    assert (tally.sequences, tally.samples, tally.row_tokens, tally.tokens, tally.trained) == (1, 3, 15, 8, 4)
    assert tally.forks == 1


def test_an_outline_names_the_sample_of_trained_tokens_and_none_for_context() -> None:
    made, _ = packed([chat("s0", range(4), [5, 5]), chat("s1", range(4), [6])], Forest())
    found = outline(made[0])
    assert found["runs"] == [[0, 4, "context", None], [4, 6, "trained", 0], [6, 7, "trained", 1]]
