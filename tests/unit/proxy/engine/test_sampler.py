import math
from dataclasses import replace

import numpy as np
import pytest

from proxy.engine.transformers.sampler import Drawn, SamplingRow, draw, new_row
from proxy.types import SamplingParams, ids_of
from tests.wide import WIDE, few

torch = pytest.importorskip("torch")

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -3.0]


def row(prompt: tuple[int, ...] = (1,), top: int = 0, grammar=None, keeps=False, banned=(), **sampling) -> SamplingRow:
    return new_row(
        SamplingParams(**{"max_tokens": 1000, "seed": 0, **sampling}),
        ids_of(prompt),
        top,
        grammar,
        keeps_unmasked=keeps,
        banned=banned,
    )


def draw_one(row: SamplingRow, logits=LOGITS) -> Drawn:
    return draw(torch.tensor([logits]), [row])[0]


def frequencies(row: SamplingRow, draws: int = 4000) -> list[float]:
    counts = [0] * len(LOGITS)
    for drawn in draw(torch.tensor([LOGITS] * draws), [row] * draws):
        counts[drawn.token] += 1
    return [count / draws for count in counts]


def softmax(logits) -> list[float]:
    return torch.tensor(logits).softmax(-1).tolist()


def test_temperature_zero_takes_the_likeliest_token_with_its_logprob_at_temperature_one():
    drawn = draw_one(row(temperature=0.0))
    assert drawn.token == 0
    assert drawn.logprob == pytest.approx(math.log(softmax(LOGITS)[0]), abs=1e-6)


def test_temperature_scales_the_distribution_and_the_logprob():
    hot = row(temperature=2.0)
    expected = softmax([value / 2 for value in LOGITS])
    drawn = draw_one(hot)
    assert drawn.logprob == pytest.approx(math.log(expected[drawn.token]), abs=1e-6)
    assert frequencies(hot) == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ({"top_k": 2}, 2),
        pytest.param({"top_p": 0.7}, 2, marks=WIDE),
        pytest.param({"min_p": 0.2}, 3, marks=WIDE),
        ({"top_k": 3, "top_p": 0.7}, 2),
        pytest.param({"min_p": 0.2, "top_p": 0.7}, 2, marks=WIDE),
        ({"top_k": 1}, 1),
        pytest.param({"top_p": 0.0}, 1, marks=WIDE),
    ],
)
def test_truncation_limits_the_tokens_but_not_the_logprob(cut, kept):
    cut_row = row(**cut)
    whole = softmax(LOGITS)
    drawn = draw_one(cut_row)
    assert drawn.logprob == pytest.approx(math.log(whole[drawn.token]), abs=1e-6)
    expected = [value / sum(whole[:kept]) for value in whole[:kept]] + [0.0] * (len(whole) - kept)
    assert frequencies(cut_row) == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize("top_k", few([0, -1, 6, 100], (0, 6, 100)))
def test_top_k_off_or_beyond_the_vocabulary_cuts_nothing(top_k):
    assert frequencies(row(top_k=top_k)) == pytest.approx(softmax(LOGITS), abs=0.04)


def test_logit_bias_is_in_the_logprob():
    drawn = draw_one(row(temperature=0.0, logit_bias=((4, 10.0),)))
    biased = softmax([*LOGITS[:4], LOGITS[4] + 10.0, LOGITS[5]])
    assert (drawn.token, drawn.logprob) == (4, pytest.approx(math.log(biased[4]), abs=1e-6))


def test_presence_and_frequency_penalties_count_the_output_alone():
    penalized = row(prompt=(0, 0, 0), temperature=0.0, presence_penalty=0.3, frequency_penalty=0.5)
    assert [draw_one(penalized).token for _ in range(3)] == [0, 0, 1]  # 2.0, 1.2, then 0.7 against 1.0
    expected = softmax([2.0 - 0.3 - 1.0, 1.0 - 0.3 - 0.5, *LOGITS[2:]])
    assert draw_one(penalized).logprob == pytest.approx(math.log(expected[0]), abs=1e-6)


def test_the_repetition_penalty_counts_prompt_and_output():
    penalized = row(prompt=(0, 4), temperature=0.0, repetition_penalty=4.0)
    first = draw_one(penalized)
    expected = softmax([0.5, 1.0, 0.5, 0.0, -4.0, -3.0])
    assert (first.token, first.logprob) == (1, pytest.approx(math.log(expected[1]), abs=1e-6))
    assert draw_one(penalized).token == 0  # token 1 is at 0.25 now; 0 and 2 are both at 0.5


def test_a_seed_samples_the_same_tokens_in_any_batch():
    alone, crowded = row(seed=3), row(seed=3)
    others = [row(seed=seed, top_k=2) for seed in range(7)] + [row(temperature=0.0)]
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    expected = [draw(logits[:1], [alone])[0].token for _ in range(20)]
    assert [draw(logits, [crowded, *others])[0].token for _ in range(20)] == expected


def test_rows_without_a_seed_differ():
    logits = torch.zeros(1, 1000)
    rows = [row(seed=None), row(seed=None)]
    assert [draw(logits, [one])[0].token for one in rows * 5] != [draw(logits, [rows[0]])[0].token] * 10


def test_top_logprobs_are_of_the_same_distribution_highest_first():
    drawn = draw_one(row(top=3, temperature=0.5, top_k=1))
    expected = [math.log(value) for value in softmax([value * 2 for value in LOGITS])]
    assert [token for token, _ in drawn.top] == [0, 1, 2]
    assert [value for _, value in drawn.top] == pytest.approx(expected[:3], abs=1e-6)


class OnlyTokens:
    """A grammar of fixed masks, one per step."""

    def __init__(self, *steps: set[int]) -> None:
        self.steps = list(steps)

    def allowed(self, remaining: int) -> np.ndarray:
        return np.array([token in self.steps[0] for token in range(len(LOGITS))])

    def accept(self, token: int) -> None:
        if token not in self.steps.pop(0):
            raise ValueError("not allowed")


def test_the_grammar_mask_is_in_the_logprob_and_advances():
    masked = row(grammar=OnlyTokens({3, 4}, {5}))
    first, second = draw_one(masked), draw_one(masked)
    assert first.token in (3, 4) and second.token == 5
    assert first.logprob == pytest.approx(math.log(softmax(LOGITS[3:5])[first.token - 3]), abs=1e-6)
    assert second.logprob == 0.0


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_the_logprob_without_the_mask_is_kept_where_asked(temperature):
    sampling = {"temperature": temperature, "logit_bias": ((4, 0.5),)}
    drawn = draw_one(row(grammar=OnlyTokens({3, 4}), keeps=True, **sampling))
    biased = [logit + 0.5 * (token == 4) for token, logit in enumerate(LOGITS)]
    shares = softmax([logit / (temperature or 1.0) for logit in biased])
    assert drawn.unmasked == pytest.approx(math.log(shares[drawn.token]), abs=1e-6)
    assert drawn.logprob > drawn.unmasked
    assert draw_one(row(grammar=OnlyTokens({3, 4}))).unmasked is None
    assert draw_one(row(keeps=True)).unmasked is None


def test_top_logprobs_leave_out_masked_tokens():
    assert [token for token, _ in draw_one(row(top=5, grammar=OnlyTokens({3, 4}))).top] == [3, 4]


@pytest.mark.parametrize("bad", [[float("nan")] * 6, [float("-inf")] * 6, [float("inf")] * 6])
def test_a_row_that_cannot_be_sampled_fails_alone(bad):
    rows = [row(), row(), row(grammar=OnlyTokens(set()))]
    drawn = draw(torch.tensor([bad, LOGITS, LOGITS]), rows)
    assert drawn[0].failure and drawn[2].failure == "the grammar allows no token here"
    assert drawn[1].failure is None
    assert replace(drawn[1]) == draw(torch.tensor([LOGITS]), [row()])[0]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.9}])
def test_banned_tokens_are_never_drawn_and_keep_their_share_of_the_distribution(sampling):
    shared = draw(torch.tensor([LOGITS] * 2), [row(banned=(0, 2), top=6, **sampling), row(**{**sampling, "seed": 5})])
    assert shared[0].token in {1, 3, 4, 5} and shared[1].token in range(6)
    assert shared[0].logprob == pytest.approx(math.log(softmax(LOGITS)[shared[0].token]), abs=1e-6)
    assert [token for token, _ in shared[0].top] == [0, 1, 2, 3, 4, 5]
    free = row(banned=(0, 2), **sampling)
    drawn = {draw_one(free).token for _ in range(200)}
    assert drawn == ({1} if sampling else {1, 3, 4, 5})


def test_banned_tokens_are_no_tokens_of_a_grammar():
    drawn = draw_one(row(grammar=OnlyTokens({0, 3, 4}), banned=(0,), temperature=0.0))
    assert drawn.token == 3 and drawn.logprob == pytest.approx(math.log(softmax([0.0, -1.0])[0]), abs=1e-6)
    assert draw_one(row(grammar=OnlyTokens({0}), banned=(0,))).failure == "the grammar allows no token here"


def test_the_logits_are_not_changed():
    logits = torch.tensor([LOGITS])
    draw(logits, [row(temperature=0.3, logit_bias=((1, 5.0),), top_k=2)])
    assert logits.tolist() == torch.tensor([LOGITS]).tolist()


def test_remaining_counts_down():
    counted = row(max_tokens=3)
    draw_one(counted)
    assert (counted.remaining, counted.drawn) == (2, 1)


def test_end_tokens_are_not_drawn_before_the_minimum_and_logprobs_are_of_the_rest():
    short = new_row(SamplingParams(max_tokens=9, temperature=0.0, min_tokens=2), ids_of([1]), ends=(0, 1))
    rest = softmax([-math.inf, -math.inf, *LOGITS[2:]])
    for _ in range(2):
        drawn = draw_one(short)
        assert drawn.token == 2 and drawn.logprob == pytest.approx(math.log(rest[2]), abs=1e-6)
    assert draw_one(short).token == 0
