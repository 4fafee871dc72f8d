"""The tokens of a turn and their states agree with every sample that an export makes, token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.api.turn_tokens import tokens_json
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.trajectory.padded_sample import PaddedSample
from proxy.trajectory.path_sample import PathSample
from proxy.trajectory.token_path import PartKind, StateRun, TokenPath, TokenStates, token_path
from proxy.trajectory.tree import Branch, build_tree, token_ids
from proxy.types import Interaction, SessionRecord
from tests.interactions import forests, interaction
from tokengrove.options.export import Drift, Keep, Layout, Padding, TooLong, TrainSelection, TurnSelection
from tokengrove.reasons import Status, TokenState

CUT = Padding(8, 6, on_too_long=TooLong.TRUNCATE, keep=Keep.MIDDLE)
DROP = Padding(5, 9, on_too_long=TooLong.DROP)
OPTIONS = (
    LayoutOptions(),
    LayoutOptions(layout=Layout.INDIVIDUAL),
    LayoutOptions(layout=Layout.TREE),
    LayoutOptions(layout=Layout.PADDED, padding=CUT),
    LayoutOptions(layout=Layout.PADDED, padding=DROP),
    LayoutOptions(drift=Drift.MASK),
    LayoutOptions(layout=Layout.PADDED, padding=CUT, drift=Drift.MASK),
    LayoutOptions(train=TrainSelection(turns=TurnSelection.LAST)),
    LayoutOptions(layout=Layout.TREE, train=TrainSelection(turns=frozenset([0]))),
)
RECORD = SessionRecord("s")


def drifted() -> list[Interaction]:
    """Three turns; the prompt of the third has the first answer again, and another one instead of the second."""
    return [
        interaction("a", suffix=[1, 2, 3], output=[4, 5], seq=0),
        interaction("b", parent="a", prefix=5, suffix=[6], output=[7, 8], seq=1),
        interaction("c", parent="b", suffix=[1, 2, 3, 4, 5, 6, 70], output=[9], seq=2),
    ]


def shown(
    node: Branch, interactions: Sequence[Interaction], options: LayoutOptions
) -> tuple[TokenPath, list[StateRun]]:
    path = token_path(node, options.drift)
    return path, TokenStates(lay_out(RECORD, interactions, options), options.layout).of(path.parts)


def trained_in(runs: Sequence[StateRun], sample: str) -> list[int]:
    """For each token 1 if it is trained in this sample, else 0."""
    return [int(run.sample == sample) for run in runs for _ in range(run.start, run.end)]


@given(forests(), st.sampled_from(OPTIONS))
def test_a_path_has_every_token_in_one_part_and_one_state(
    interactions: list[Interaction], options: LayoutOptions
) -> None:
    for node in build_tree(interactions).values():
        path, runs = shown(node, interactions, options)
        assert path.ids == token_ids(node)
        for pieces in (path.parts, runs):
            ends = [piece.end for piece in pieces]
            assert [piece.start for piece in pieces] == [0, *ends[:-1]]
            assert ends[-1] == len(path.ids)
        for part in path.parts:
            if part.kind is PartKind.OUTPUT:
                assert path.ids[part.start : part.end] == part.interaction.output_ids


@given(forests(), st.sampled_from(OPTIONS))
@example(drifted(), LayoutOptions(drift=Drift.MASK))
@example(drifted(), LayoutOptions(layout=Layout.PADDED, padding=CUT, drift=Drift.MASK))
def test_states_are_those_of_the_exported_masks(interactions: list[Interaction], options: LayoutOptions) -> None:
    nodes = build_tree(interactions)
    for row in lay_out(RECORD, interactions, options).rows:
        if isinstance(row, PathSample):
            path, runs = shown(nodes[row.last.id], interactions, options)
            assert path.ids.tolist() == row.arrays.input_ids.tolist()
            assert trained_in(runs, row.last.id) == row.arrays.loss_mask.tolist()
        elif isinstance(row, PaddedSample):
            path, runs = shown(nodes[row.sample.last.id], interactions, options)
            mask = np.zeros(len(path.ids), int)
            columns, window = row.columns(), row.window
            mask[window.response.start : window.response.stop] = columns["response_mask"][: len(window.response)]
            assert trained_in(runs, row.sample.last.id) == mask.tolist()
        else:
            columns, last = row.columns(), row.placements[-1].interaction.id
            for at, placed in enumerate(row.placements):
                first, end = columns["node_offsets"][at : at + 2]
                runs = shown(nodes[placed.interaction.id], interactions, options)[1]
                assert trained_in(runs, last)[first - end :] == columns["loss_mask"][first:end].tolist()


@given(forests(), st.sampled_from(OPTIONS))
@example(drifted(), LayoutOptions(drift=Drift.MASK))
@example(drifted(), LayoutOptions(layout=Layout.PADDED, padding=CUT, drift=Drift.MASK))
def test_states_count_as_the_ledger_counts(interactions: list[Interaction], options: LayoutOptions) -> None:
    laid = lay_out(RECORD, interactions, options)
    states, counts = TokenStates(laid, options.layout), Counter[str]()
    for node in build_tree(interactions).values():
        path = token_path(node, options.drift)
        own = path.parts[-1]
        assert own.interaction is node.interaction
        for run in states.of([own]):
            counts[run.state.value] += run.end - run.start
    trained = counts.pop(TokenState.TRAINED.value, 0)
    assert (trained, dict(counts)) == (laid.ledger.trained(), laid.ledger.untrained())
    assert trained + sum(counts.values()) == laid.ledger.sampled()


@given(forests())
def test_sections_begin_where_a_prompt_does_not_begin_with_the_tokens_above(interactions: list[Interaction]) -> None:
    for node in build_tree(interactions).values():
        path = token_path(node, Drift.FORK)
        turns = [each for section in path.sections for each in section.interactions]
        above, names = node.parent, [node.interaction.id]
        while above is not None:
            names.append(above.interaction.id)
            above = above.parent
        assert [each.id for each in turns] == names[::-1]
        for number, section in enumerate(path.sections):
            assert [each.aligned for each in section.interactions[1:]] == [True] * (len(section.interactions) - 1)
            assert (section.differs is None) == (number == 0)
        assert path.sections[-1].tokens == len(path.ids)
        assert {each.id for each in path.lost} == {each.id for s in path.sections[:-1] for each in s.interactions}


def test_a_break_shows_the_first_token_that_differs() -> None:
    first, second = token_path(build_tree(drifted())["c"], Drift.FORK).sections
    assert (first.differs, first.tokens, [each.id for each in first.interactions]) == (None, 8, ["a", "b"])
    assert second.differs is not None
    assert (second.differs.index, second.differs.sent, second.differs.recorded) == (6, [70], [7, 8])


def test_a_prompt_that_ends_early_differs_behind_its_last_token() -> None:
    above = interaction("a", suffix=[1, 2, 3], output=[4, 5], seq=0)
    below = interaction("b", parent="a", suffix=[1, 2, 3], output=[9], seq=1)
    differs = token_path(build_tree([above, below])["b"], Drift.FORK).sections[-1].differs
    assert differs is not None
    assert (differs.index, differs.sent, differs.recorded) == (3, [], [4, 5])


def test_the_tokens_that_are_shown_are_those_of_the_drift_that_is_asked_for() -> None:
    nodes = drifted()
    for drift in Drift:
        shown = tokens_json(RECORD, nodes, nodes[-1], LayoutOptions(drift=drift))
        path = token_path(build_tree(nodes)["c"], drift)
        assert [(part["kind"], part["start"]) for part in shown["parts"]] == [
            (part.kind.value, part.start) for part in path.parts
        ]
        assert len(shown["lost"]) == len(path.lost)


def test_a_token_without_a_logprob_has_none() -> None:
    node = replace(interaction("a", suffix=[1], output=[2, 3]), has_logprobs=False)
    assert tokens_json(RECORD, [node], node, LayoutOptions())["logprobs"] == [None] * 3


def test_the_versions_of_an_output_follow_each_other() -> None:
    first = replace(interaction("a", suffix=[1, 2], output=[3, 4, 5, 6, 7, 8]), versions=((1, 3), (2, 4), (3, 6)))
    second = replace(
        interaction("b", parent="a", prefix=8, suffix=[9], output=[10, 11], seq=1), versions=((1, 6), (1, 7))
    )
    shown = tokens_json(RECORD, [first, second], second, LayoutOptions())
    assert [(run["start"], run["end"], run["version"]) for run in shown["versions"]] == [
        *[(2, 3, 3), (3, 5, 4), (5, 8, 6)],
        *[(9, 10, 6), (10, 11, 7)],
    ]


@pytest.mark.parametrize(
    ("drift", "parts", "lost"),
    [
        (Drift.FORK, [("c", "prompt", 0, 7), ("c", "output", 7, 8)], ["a", "b"]),
        (
            Drift.MASK,
            [("c", "prompt", 0, 3), ("a", "output", 3, 5), ("c", "prompt", 5, 7), ("c", "output", 7, 8)],
            ["b"],
        ),
    ],
)
def test_outputs_above_a_break_count_where_an_export_finds_them_again(
    drift: Drift, parts: list[tuple[str, str, int, int]], lost: list[str]
) -> None:
    path = token_path(build_tree(drifted())["c"], drift)
    assert [(part.interaction.id, part.kind.value, part.start, part.end) for part in path.parts] == parts
    assert [each.id for each in path.lost] == lost


def test_a_fork_says_in_which_sample_the_common_turns_are_trained() -> None:
    interactions = [
        interaction("a", suffix=[1], output=[2, 3], seq=0),
        interaction("b", parent="a", prefix=3, suffix=[4], output=[5], seq=1),
        interaction("c", parent="a", prefix=3, suffix=[6], output=[7], seq=2),
    ]
    runs = shown(build_tree(interactions)["c"], interactions, LayoutOptions())[1]
    assert [(run.state, run.sample) for run in runs] == [
        (TokenState.CONTEXT, None),
        (TokenState.TRAINED, "b"),
        (TokenState.CONTEXT, None),
        (TokenState.TRAINED, "c"),
    ]


@pytest.mark.parametrize("status", [Status.FAILED, Status.ABORTED, Status.SUPERSEDED])
def test_the_output_of_a_turn_that_did_not_complete_is_in_no_export(status: Status) -> None:
    above = interaction("a", suffix=[1], output=[2], seq=0)
    ended = interaction("b", parent="a", prefix=2, suffix=[3], output=[4, 5], seq=1)
    ended.status = status
    node = Branch(ended, build_tree([above, ended])["a"], 1)
    runs = shown(node, [above, ended], LayoutOptions())[1]
    assert [run.state for run in runs] == [TokenState.CONTEXT, TokenState.TRAINED, TokenState.CONTEXT, status]
