"""Kept sets of a sample: listed, inverted, of all ids and missing, against sets written out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.replayed import VOCABULARY, kept
from tokengrove.client.kept_sets import KeptSets
from tokengrove.errors import InvalidRequest


def sets() -> KeptSets:
    """Token 0 is missing, 1 lists {2, 5}, 2 lists all but {0, 11}, 3 is missing, 4 has all ids, 5 lists {7}."""
    columns = kept(6, {1: [5, 2], 5: [7]}, {2: [11, 0], 4: []})
    return KeptSets(columns["kept_counts"], columns["kept_ids"])


ALL = list(range(VOCABULARY))
OF = {1: [2, 5], 2: ALL[1:-1], 4: ALL, 5: [7]}


def test_the_ids_of_each_form_of_a_set() -> None:
    for token, ids in OF.items():
        assert sets().of(token, VOCABULARY).tolist() == ids
    assert sets().sizes(VOCABULARY).tolist() == [0, 2, 10, 0, 12, 1]
    assert sets().missing.tolist() == [True, False, False, True, False, False]
    assert sets().unrestricted.tolist() == [False, False, False, False, True, False]


@pytest.mark.parametrize("token", [0, 3])
def test_a_missing_set_has_no_ids_to_return(token: int) -> None:
    with pytest.raises(InvalidRequest, match=f"token {token} has no recorded kept set"):
        sets().of(token, VOCABULARY)


def test_masks_are_true_within_the_sets_and_for_tokens_without_one() -> None:
    mask = sets().mask(VOCABULARY)
    assert (mask.dtype, mask.shape) == (np.dtype(bool), (6, VOCABULARY))
    for token in range(6):
        assert np.flatnonzero(mask[token]).tolist() == OF.get(token, ALL)
    assert [row.tolist() for row in sets().masks(VOCABULARY)] == mask.tolist()


@pytest.mark.parametrize("part", [slice(1, 3), slice(0, 6), slice(2, 2), slice(4, 99), slice(-2, None), slice(5, 1)])
def test_a_part_has_the_sets_of_its_tokens(part: slice) -> None:
    assert sets()[part].mask(VOCABULARY).tolist() == sets().mask(VOCABULARY)[part].tolist()
    assert sets()[part].counts.tolist() == sets().counts[part].tolist()


def test_a_log_softmax_within_the_sets_is_that_of_the_kept_logits_alone() -> None:
    logits = np.random.default_rng(3).normal(size=(6, VOCABULARY))
    found = sets().log_softmax(logits)
    for token in range(6):
        ids = OF.get(token, ALL)
        alone = logits[token, ids] - np.log(np.exp(logits[token, ids]).sum())
        assert np.allclose(found[token, ids], alone, atol=1e-12)
        assert np.isneginf(np.delete(found[token], ids)).all()
    assert found[5, 7] == 0.0


def test_sets_contain_the_tokens_that_their_masks_let_through() -> None:
    for seed in range(20):
        tokens = np.random.default_rng(seed).integers(0, VOCABULARY, 6)
        within = sets().mask(VOCABULARY)[np.arange(6), tokens] & ~sets().missing
        assert sets().contain(tokens).tolist() == within.tolist()


def test_logits_of_large_size_do_not_overflow() -> None:
    logits = np.full((6, VOCABULARY), 1e4)
    assert np.allclose(sets().log_softmax(logits)[1, [2, 5]], -np.log(2))


def test_counts_that_list_another_number_of_ids_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="list 2 ids, but there are 3"):
        KeptSets(np.array([2, 0], np.int32), np.array([1, 2, 3], np.uint16))


def test_an_id_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="id 11, but the vocabulary has 11 ids"):
        sets().mask(11)


def test_no_tokens_have_no_sets() -> None:
    none = KeptSets(np.zeros(0, np.int32), np.zeros(0, np.uint16))
    assert none.mask(3).shape == (0, 3)
    assert none.listed() == []
