"""Scores what a gateway exports against what the engine sampled. It knows nothing of any gateway.

The oracle is the engine's own log: each answer has the digest of the prompt ids that the engine received and the ids
that it sampled. An answer counts once the client has read all of it.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

Key = tuple[int, int, int]
"""Session, turn and attempt of an answer."""


def digest(ids: Sequence[int]) -> str:
    """Return a digest of token ids."""
    return blake2b((ids if isinstance(ids, array) else array("i", ids)).tobytes(), digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True)
class Sampled:
    """An answer in the engine's log. `continues`: turn and attempt whose prompt and answer its prompt begins with."""

    session: int
    turn: int
    attempt: int
    prompt: str
    ids: tuple[int, ...]
    continues: tuple[int, int] | None = None

    @property
    def key(self) -> Key:
        return self.session, self.turn, self.attempt

    @staticmethod
    def of(logged: Mapping[str, Any]) -> Sampled:
        """Return the answer of an entry of the engine's log."""
        continues = logged["continues"]
        place = logged["session"], logged["turn"], logged["attempt"]
        return Sampled(*place, logged["prompt"], tuple(logged["sampled"]), tuple(continues) if continues else None)


@dataclass(frozen=True, slots=True)
class Sample:
    """A training sample of a session, as a gateway exports it. `mask`: true for tokens that are trained."""

    session: int
    ids: Sequence[int]
    mask: Sequence[int | bool]

    def runs(self) -> Iterable[tuple[int, int]]:
        """Yield the first and the last place (exclusive) of each run of trained tokens."""
        start = None
        for place, trained in enumerate([*self.mask, False]):
            if trained and start is None:
                start = place
            elif not trained and start is not None:
                yield start, place
                start = None


@dataclass(slots=True)
class Exactness:
    """Counts of tokens, and of turns where named so.

    `sampled`: of the answers that the client read whole; each is either `exact` or `lost`, unless it is exported as
    other ids. `exact`: trained once or more, with the ids that the engine sampled. `wrong`: trained ids that the engine
    did not sample there. `lost`: trained in no sample. `twice`: trained again in a further sample. `moved`: exact, but
    behind other ids than the engine had as the prompt. `unseen`: trained, of answers that the client did not read
    whole. `sample_tokens`: of all samples, with prompts. `lost_turns`: answers of which no token is trained.
    """

    turns: int = 0
    sampled: int = 0
    exact: int = 0
    wrong: int = 0
    lost: int = 0
    twice: int = 0
    moved: int = 0
    unseen: int = 0
    samples: int = 0
    sample_tokens: int = 0
    lost_turns: int = 0
    broken_turns: int = 0
    """Turns whose prompt does not begin with the ids of the turn that the agent continued: they were re-tokenised."""
    continuing_turns: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(slots=True)
class _Credit:
    """How an answer was exported so far: the most of its tokens that one run trains as sampled."""

    exact: int = 0
    length: int = 0
    runs: int = 0


@dataclass(slots=True)
class _Scorer:
    answers: Mapping[Key, Sampled]
    seen: frozenset[Key]
    by_session: dict[int, list[Sampled]] = field(default_factory=lambda: defaultdict(list))
    credits: dict[Key, _Credit] = field(default_factory=lambda: defaultdict(_Credit))
    score: Exactness = field(default_factory=Exactness)

    def __post_init__(self) -> None:
        for answer in self.answers.values():
            self.by_session[answer.session].append(answer)

    def add(self, sample: Sample) -> None:
        self.score.samples += 1
        self.score.sample_tokens += len(sample.ids)
        for start, end in sample.runs():
            self._add_run(sample, start, end)

    def _add_run(self, sample: Sample, start: int, end: int) -> None:
        run = tuple(sample.ids[start:end])
        answer, moved = self._match(sample, start, run)
        if answer is None:
            self.score.wrong += len(run)
            return
        exact = common(run, answer.ids)
        if answer.key not in self.seen:
            self.score.unseen += len(run)
            return
        credit = self.credits[answer.key]
        self.score.wrong += len(run) - exact
        self.score.moved += exact if moved else 0
        if credit.runs:
            self.score.twice += min(exact, credit.exact)
        credit.exact, credit.length = max(credit.exact, exact), max(credit.length, len(run))
        credit.runs += 1

    def _match(self, sample: Sample, start: int, run: tuple[int, ...]) -> tuple[Sampled | None, bool]:
        """Return the answer that a run trains, and whether it stands behind another prompt than the engine had."""
        known = self.by_session.get(sample.session, [])
        prompt = digest(sample.ids[:start])
        for moved, candidates in ((False, [one for one in known if one.prompt == prompt]), (True, known)):
            # Of equal answers, one that is not credited yet; else the same answer would count twice for its twin.
            ranked = [(common(run, one.ids), -self.credits[one.key].runs, one) for one in candidates]
            best = max(ranked, key=lambda entry: entry[:2], default=None)
            if best is not None and 2 * best[0] >= len(run):
                return best[2], moved
        return None, False

    def result(self) -> Exactness:
        score = self.score
        for key in self.seen & self.answers.keys():
            ids, credit = self.answers[key].ids, self.credits[key]
            score.turns += 1
            score.sampled += len(ids)
            score.exact += credit.exact
            score.lost += max(0, len(ids) - max(credit.length, credit.exact))
            score.lost_turns += not credit.runs
        return score


def score(answers: Iterable[Sampled], seen: Iterable[Key], samples: Iterable[Sample]) -> Exactness:
    """Return the score of an export. `answers`: the engine's log. `seen`: the answers that the client read whole."""
    scorer = _Scorer({answer.key: answer for answer in answers}, frozenset(seen))
    for sample in samples:
        scorer.add(sample)
    return scorer.result()


def count_breaks(answers: Iterable[Sampled], continued: Mapping[Key, tuple[int, int]]) -> tuple[int, int]:
    """Return the turns whose prompt re-tokenises the turn that they continue, and all turns that continue one.

    `continued`: of each answer of the client that continues another, the turn and attempt of that one.
    """
    found = [answer.continues != continued[answer.key] for answer in answers if answer.key in continued]
    return sum(found), len(found)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many ids two sequences share at their beginning and, beyond it, at their end."""
    short = min(len(one), len(other))
    if one[:short] == other[:short]:
        return short
    head = next(place for place in range(short) if one[place] != other[place])
    tail = 0
    while tail < short - head and one[-1 - tail] == other[-1 - tail]:
        tail += 1
    return head + tail
