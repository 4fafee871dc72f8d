"""The scores of `benchmarks.scoring`, on exports that are made by hand."""

from __future__ import annotations

from array import array

from benchmarks.scoring import Exactness, Sample, Sampled, common, count_breaks, digest, score

PROMPT, ANSWER = (1, 2, 3), (10, 11, 12, 13)
LATER, NEXT = (*PROMPT, *ANSWER, 4, 5), (20, 21)
FIRST = Sampled(0, 0, 0, digest(PROMPT), ANSWER)
SECOND = Sampled(0, 1, 0, digest(LATER), NEXT, (0, 0))
BOTH = (FIRST, SECOND)
SEEN = {FIRST.key, SECOND.key}


def sample(*parts: tuple[tuple[int, ...], int]) -> Sample:
    ids = [token for part, _ in parts for token in part]
    return Sample(0, ids, [trained for part, trained in parts for _ in part])


def counts(found: Exactness) -> tuple[int, int, int, int, int]:
    return found.exact, found.wrong, found.lost, found.twice, found.moved


def test_a_sample_of_both_turns_is_exact() -> None:
    found = score(BOTH, SEEN, [sample((PROMPT, 0), (ANSWER, 1), ((4, 5), 0), (NEXT, 1))])
    assert counts(found) == (6, 0, 0, 0, 0)
    assert (found.turns, found.sampled, found.samples, found.sample_tokens) == (2, 6, 1, 11)


def test_a_sample_for_each_call_is_exact_and_has_more_tokens() -> None:
    found = score(BOTH, SEEN, [sample((PROMPT, 0), (ANSWER, 1)), sample((LATER, 0), (NEXT, 1))])
    assert counts(found) == (6, 0, 0, 0, 0)
    assert found.sample_tokens == 18


def test_an_answer_that_two_samples_train_is_counted_twice() -> None:
    once = sample((PROMPT, 0), (ANSWER, 1))
    found = score([FIRST], {FIRST.key}, [once, sample((PROMPT, 0), (ANSWER, 1), ((4, 5), 0))])
    assert counts(found) == (4, 0, 0, 4, 0)


def test_an_answer_that_no_sample_has_is_lost() -> None:
    found = score(BOTH, SEEN, [sample((PROMPT, 0), (ANSWER, 1))])
    assert (counts(found), found.lost_turns) == ((4, 0, 2, 0, 0), 1)


def test_an_answer_without_its_last_token_loses_one_token() -> None:
    found = score([FIRST], {FIRST.key}, [sample((PROMPT, 0), (ANSWER[:3], 1))])
    assert (counts(found), found.lost_turns) == ((3, 0, 1, 0, 0), 0)


def test_tokens_that_were_encoded_again_are_wrong() -> None:
    found = score([FIRST], {FIRST.key}, [sample((PROMPT, 0), ((10, 99, 12, 13), 1))])
    assert counts(found) == (3, 1, 0, 0, 0)


def test_tokens_that_no_answer_resembles_are_wrong_and_the_answer_is_lost() -> None:
    found = score([FIRST], {FIRST.key}, [sample((PROMPT, 0), ((70, 71, 72), 1))])
    assert counts(found) == (0, 3, 4, 0, 0)


def test_an_answer_behind_another_prompt_is_moved() -> None:
    found = score([FIRST], {FIRST.key}, [sample(((1, 9, 3), 0), (ANSWER, 1))])
    assert counts(found) == (4, 0, 0, 0, 4)


def test_an_answer_of_another_session_does_not_count() -> None:
    found = score([FIRST], {FIRST.key}, [Sample(7, [*PROMPT, *ANSWER], [0, 0, 0, 1, 1, 1, 1])])
    assert counts(found) == (0, 4, 4, 0, 0)


def test_two_equal_answers_to_equal_prompts_are_two_answers() -> None:
    again = Sampled(0, 0, 1, digest(PROMPT), ANSWER)
    once = sample((PROMPT, 0), (ANSWER, 1))
    found = score([FIRST, again], {FIRST.key, again.key}, [once, once])
    assert counts(found) == (8, 0, 0, 0, 0)


def test_an_answer_that_was_not_read_whole_is_no_loss_and_is_told() -> None:
    found = score(BOTH, {FIRST.key}, [sample((PROMPT, 0), (ANSWER, 1), ((4, 5), 0), (NEXT, 1))])
    assert (counts(found), found.unseen) == ((4, 0, 0, 0, 0), 2)


def test_a_turn_is_broken_if_its_prompt_does_not_begin_with_the_turn_before() -> None:
    broken = Sampled(0, 2, 0, "other", NEXT, (0, 0))
    continued = {SECOND.key: (0, 0), broken.key: (1, 0)}
    assert count_breaks([FIRST, SECOND, broken], continued) == (1, 2)


def test_ids_are_common_at_both_ends() -> None:
    assert [common((1, 2, 3), other) for other in ((1, 2, 3), (1, 9, 3), (1,), (), (4, 5, 6))] == [3, 2, 1, 0, 0]


def test_a_digest_is_of_the_ids_and_not_of_their_container() -> None:
    assert digest([1, 2]) == digest((1, 2)) == digest(array("i", [1, 2])) != digest([2, 1])
