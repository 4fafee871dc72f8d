"""Images of samples: in every layout and under every option their spans are exactly the placeholder tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.trajectory.sample_row import SampleRow
from proxy.trajectory.token_path import TokenStates, token_path
from proxy.trajectory.tree import build_tree, images_of
from proxy.types import Interaction, PlacedImage, SessionRecord, ids_of
from tests.interactions import interaction
from tokengrove.options.export import Drift, Images, Keep, Layout, Padding, TooLong
from tokengrove.reasons import TokenState

RECORD = SessionRecord("s", discount=1.0)
OPEN, CLOSE = 100_001, 100_002
FIRST_PLACEHOLDER = 200_000
"""Each image of a test has a placeholder of its own, so that a span of another image is found out."""


@dataclass
class Drawn:
    """Interactions, and the placeholder that stands for each digest. `marked`: images stand between two marks."""

    nodes: list[Interaction]
    placeholders: dict[str, int]
    marked: bool


def _prompt(draw: st.DrawFn, begin: int, at: int, drawn: Drawn) -> tuple[list[int], list[PlacedImage]]:
    """Text and images in any order; an image may be one that the session showed before."""
    ids: list[int] = []
    placed: list[PlacedImage] = []
    for part in range(draw(st.integers(1, 4))):
        ids += range(100 * at + 10 * part, 100 * at + 10 * part + draw(st.integers(0, 2)))
        if draw(st.booleans()):
            old = sorted(drawn.placeholders)
            again = bool(old) and draw(st.booleans())
            digest = draw(st.sampled_from(old)) if again else f"{len(old):064}"
            placeholder = drawn.placeholders.setdefault(digest, FIRST_PLACEHOLDER + len(old))
            length = placeholder % 3 + 1
            ids += [OPEN] * drawn.marked
            placed.append(PlacedImage(digest, begin + len(ids), length, 28 * length, 28, "low" if length == 2 else ""))
            ids += [placeholder] * length + [CLOSE] * drawn.marked
    return ids or [100 * at + 99], placed


@st.composite
def sessions(draw: st.DrawFn) -> Drawn:
    """Trees of up to eight turns with images in their prompts, some of them drifted."""
    drawn = Drawn([], {}, draw(st.booleans()))
    for at in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *drawn.nodes]))
        prefix = parent.prompt_tokens + len(parent.output_ids) if parent and draw(st.booleans()) else 0
        suffix, placed = _prompt(draw, prefix, at, drawn)
        output = range(100 * at + 50, 100 * at + 50 + draw(st.integers(1, 3)))
        name = parent.id if parent else None
        made = interaction(str(at), parent=name, prefix=prefix, suffix=suffix, output=output, seq=at)
        made.images = tuple(placed)
        made.trainable = draw(st.booleans())
        drawn.nodes.append(made)
    return drawn


@st.composite
def layouts(draw: st.DrawFn) -> LayoutOptions:
    """Any layout, with any lengths and ways to cut."""
    layout = draw(st.sampled_from(Layout))
    padding = None
    if layout is Layout.PADDED:
        too_long = draw(st.sampled_from([TooLong.DROP, TooLong.TRUNCATE]))
        prompt, response = draw(st.integers(1, 40)), draw(st.integers(1, 20))
        padding = Padding(prompt, response, on_too_long=too_long, keep=draw(st.sampled_from(Keep)))
    drift = Drift.FORK if layout is Layout.TREE else draw(st.sampled_from(Drift))
    return LayoutOptions(layout=layout, drift=drift, padding=padding)


def runs(ids: Sequence[int], drawn: Drawn) -> list[tuple[str, int, int]]:
    """The oracle: digest, start and length of every run of placeholders in the ids of a row.

    Equal images without a mark between them are one run, which is divided by the known length of the image.
    """
    digests = {placeholder: digest for digest, placeholder in drawn.placeholders.items()}
    found, at = [], 0
    for token, group in groupby(ids):
        count = len(list(group))
        if token in digests:
            length = token % 3 + 1
            assert count % length == 0, "a part of an image"
            found += [(digests[token], start, length) for start in range(at, at + count, length)]
        at += count
    return found


def told(row: SampleRow) -> list[tuple[str, int, int]]:
    return [(each["digest"], each["start"], each["length"]) for each in row.labels().get("images", [])]


FEWER = settings(max_examples=60)


@FEWER
@given(sessions(), layouts())
def test_spans_are_the_runs_of_placeholders_of_the_row(drawn: Drawn, options: LayoutOptions) -> None:
    for row in lay_out(RECORD, drawn.nodes, options).rows:
        columns = row.columns()
        assert told(row) == runs(columns["input_ids"].tolist(), drawn)
        placeholder = columns["input_ids"] >= FIRST_PLACEHOLDER
        assert not columns["loss_mask"][placeholder].any()
        assert (columns["turn_ids"][placeholder] == -1).all()


@FEWER
@given(sessions(), layouts())
def test_images_change_nothing_else_of_a_row_that_is_not_cut(drawn: Drawn, options: LayoutOptions) -> None:
    blind = [replace(node, images=()) for node in drawn.nodes]
    if options.padding is not None:
        options = replace(options, padding=replace(options.padding, on_too_long=TooLong.DROP))
    rows, others = (lay_out(RECORD, nodes, options).rows for nodes in (drawn.nodes, blind))
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        labels = row.labels()
        labels.pop("images", None)
        assert labels == other.labels()
        columns = row.columns()
        assert all(np.array_equal(columns[name], value) for name, value in other.columns().items())


@FEWER
@given(sessions(), layouts())
def test_without_images_no_row_tells_of_them_and_cuts_stay_the_same(drawn: Drawn, options: LayoutOptions) -> None:
    rows = lay_out(RECORD, drawn.nodes, options).rows
    silent = lay_out(RECORD, drawn.nodes, replace(options, images=Images.NONE)).rows
    for row, other in zip(rows, silent, strict=True):
        assert other.images == ()
        assert "images" not in other.labels()
        assert np.array_equal(row.columns()["input_ids"], other.columns()["input_ids"])


def turn_with_image(length: int = 4) -> Interaction:
    """Prompt: 1, mark, image, mark, 2; output: 7, 8."""
    node = interaction("a", suffix=[1, OPEN, *[FIRST_PLACEHOLDER] * length, CLOSE, 2], output=[7, 8])
    node.images = (PlacedImage("d" * 64, 2, length, 56, 56, "high"),)
    return node


def with_result(node: Interaction) -> list[Interaction]:
    """The turn, and one whose tool result is an image: 3, mark, image, mark; output: 9."""
    prefix = node.prompt_tokens + len(node.output_ids)
    suffix = [3, OPEN, *[FIRST_PLACEHOLDER + 1] * 2, CLOSE]
    child = interaction("b", parent="a", prefix=prefix, suffix=suffix, output=[9], seq=1)
    child.images = (PlacedImage("e" * 64, prefix + 2, 2, 56, 28),)
    return [node, child]


def test_an_image_that_begins_a_prompt_is_kept() -> None:
    node = interaction("a", suffix=[*[FIRST_PLACEHOLDER] * 3, 2], output=[7, 8])
    node.images = (PlacedImage("d" * 64, 0, 3, 56, 56),)
    (row,) = lay_out(RECORD, [node], LayoutOptions(layout=Layout.PADDED, padding=Padding(6, 2))).rows
    assert told(row) == [("d" * 64, 2, 3)]


def test_a_span_tells_digest_place_and_size() -> None:
    (row,) = lay_out(RECORD, [turn_with_image()], LayoutOptions()).rows
    expected = {"digest": "d" * 64, "start": 2, "length": 4, "width": 56, "height": 56, "detail": "high"}
    assert row.labels()["images"] == [expected]


def test_padding_moves_the_spans_of_the_prompt_and_of_the_response() -> None:
    padding = Padding(prompt_length=12, response_length=12)
    (row,) = lay_out(RECORD, with_result(turn_with_image()), LayoutOptions(layout=Layout.PADDED, padding=padding)).rows
    assert told(row) == [("d" * 64, 6, 4), ("e" * 64, 16, 2)]


@pytest.mark.parametrize("prompt_length", range(3, 8))
def test_a_prompt_cut_inside_of_an_image_loses_the_image_and_its_marks(prompt_length: int) -> None:
    padding = Padding(prompt_length, response_length=4, on_too_long=TooLong.TRUNCATE)
    (row,) = lay_out(RECORD, [turn_with_image()], LayoutOptions(layout=Layout.PADDED, padding=padding)).rows
    columns, labels = row.columns(), row.labels()
    whole = prompt_length == 7
    assert columns["prompt_lengths"].tolist() == [7 if whole else 1]
    assert labels["truncated_tokens"] == (1 if whole else 7)
    assert len(labels.get("images", ())) == whole


@pytest.mark.parametrize(("keep", "expected"), [(Keep.HEAD, [7, 8, 3]), (Keep.TAIL, [9])])
def test_a_response_cut_inside_of_an_image_loses_the_image(keep: Keep, expected: list[int]) -> None:
    padding = Padding(prompt_length=20, response_length=4, on_too_long=TooLong.TRUNCATE, keep=keep)
    (row,) = lay_out(RECORD, with_result(turn_with_image()), LayoutOptions(layout=Layout.PADDED, padding=padding)).rows
    length = row.columns()["response_lengths"].item()
    assert row.columns()["responses"][:length].tolist() == expected
    assert [digest for digest, _, _ in told(row)] == ["d" * 64]


def test_an_image_in_the_kept_end_of_a_response_moves_with_it() -> None:
    padding = Padding(prompt_length=20, response_length=6, on_too_long=TooLong.TRUNCATE, keep=Keep.TAIL)
    (row,) = lay_out(RECORD, with_result(turn_with_image()), LayoutOptions(layout=Layout.PADDED, padding=padding)).rows
    assert row.columns()["responses"].tolist() == [3, OPEN, *[FIRST_PLACEHOLDER + 1] * 2, CLOSE, 9]
    assert told(row) == [("d" * 64, 14, 4), ("e" * 64, 22, 2)]


def test_an_image_that_ends_the_prompt_is_not_cut_by_the_answer() -> None:
    node = interaction("a", suffix=[1, *[FIRST_PLACEHOLDER] * 3], output=[7])
    node.images = (PlacedImage("d" * 64, 1, 3),)
    padding = Padding(prompt_length=4, response_length=4, on_too_long=TooLong.TRUNCATE)
    (row,) = lay_out(RECORD, [node], LayoutOptions(layout=Layout.PADDED, padding=padding)).rows
    assert row.columns()["prompts"].tolist() == ids_of([1, *[FIRST_PLACEHOLDER] * 3]).tolist()


@pytest.mark.parametrize("layout", [Layout.CONCAT, Layout.INDIVIDUAL, Layout.TREE])
def test_a_placeholder_that_was_sampled_is_not_trained_and_has_its_reason(layout: Layout) -> None:
    node = interaction("a", suffix=[1, 2], output=[7, FIRST_PLACEHOLDER, 8])
    laid = lay_out(RECORD, [node], LayoutOptions(layout=layout, placeholders=frozenset({FIRST_PLACEHOLDER})))
    (row,) = laid.rows
    assert row.columns()["loss_mask"].tolist() == [0, 0, 1, 0, 1]
    assert row.columns()["logprobs"].tolist() == [0, 0, -0.5, 0, -0.5]
    assert laid.ledger.untrained() == {"placeholder": 1}
    assert laid.ledger.trained() == 2


def test_a_turn_that_is_left_out_keeps_its_reason_where_it_sampled_a_placeholder() -> None:
    node = interaction("a", suffix=[1], output=[FIRST_PLACEHOLDER, 8])
    node.has_logprobs = False
    laid = lay_out(RECORD, [node], LayoutOptions(placeholders=frozenset({FIRST_PLACEHOLDER})))
    assert laid.ledger.untrained() == {"no_logprobs": 2}


@FEWER
@given(sessions(), layouts())
def test_states_of_a_path_are_image_exactly_on_its_placeholders(drawn: Drawn, options: LayoutOptions) -> None:
    laid = lay_out(RECORD, drawn.nodes, options)
    states = TokenStates(laid, options.layout)
    for node in build_tree(drawn.nodes).values():
        path = token_path(node, options.drift)
        runs = states.of(path.parts, images_of(node))
        assert [run.start for run in runs[1:]] == [run.end for run in runs[:-1]]
        assert (runs[0].start, runs[-1].end) == (0, len(path.ids))
        shown = [at for run in runs if run.state is TokenState.IMAGE for at in range(run.start, run.end)]
        assert shown == [at for at, token in enumerate(path.ids) if token >= FIRST_PLACEHOLDER]
