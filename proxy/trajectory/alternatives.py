"""Answers to one prompt are alternatives, or steps of one episode: by when they were sampled, not by what was asked.

Alternatives are rewarded choices of one request (`n`), or rewarded answers of which two overlapped: the later was begun
before the earlier was complete, so neither can be a step after the other. An agent without memory asks the same again
when it observes the same again: answers one after the other are steps, and their rewards add up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from proxy.trajectory.tree import Branch
from tokengrove.reasons import Reason

# The reasons that a second answer to one prompt can have. Without an aligned parent, its reason says only that.
ASKED_AGAIN = frozenset({Reason.RESAMPLED, Reason.TEMPLATE, Reason.DRIFT})


class Pair(NamedTuple):
    """The ids of two rewarded answers to one prompt, in the order in which they began."""

    earlier: str
    later: str


@dataclass(frozen=True, slots=True)
class RewardedAnswers:
    """What the rewarded answers to one prompt are in a session; rewarded: on themselves or on a turn below.

    `choices`: two choices of one request. `overlapping`: two that overlapped. `successive`: one after the other. Each
    is the first such pair, None if there is none.
    """

    choices: Pair | None = None
    overlapping: Pair | None = None
    successive: Pair | None = None

    @property
    def are_alternatives(self) -> bool:
        """Whether some are alternatives, so that their sum would hide which was better."""
        return self.choices is not None or self.overlapping is not None


def rewarded_answers(nodes: Mapping[str, Branch], main: Mapping[str, float | None]) -> RewardedAnswers:
    """Find answers to one prompt that have `main` rewards. `nodes` are complete, in order of `seq`."""
    choices = overlapping = successive = None
    for answers in _answers(nodes, _rewarded(nodes, main)):
        first = {_request(node): node for node in reversed(answers)}
        choices = choices or _choices(answers, first)
        if not any(node.interaction.reason in ASKED_AGAIN for node in answers):
            continue  # the caller's own state hash: their prompts differ
        for earlier, later in _one_after_the_other(list(first.values())[::-1]):
            overlaps = later.interaction.created_at < (earlier.interaction.completed_at or 0.0)
            if overlaps:
                overlapping = overlapping or _pair(earlier, later)
            else:
                successive = successive or _pair(earlier, later)
    return RewardedAnswers(choices, overlapping, successive)


def _choices(answers: Sequence[Branch], first: Mapping[str, Branch]) -> Pair | None:
    """Two answers of one request; `first` has the first answer of each."""
    others = (node for node in answers if first[_request(node)] is not node)
    return next((_pair(first[_request(node)], node) for node in others), None)


def _rewarded(nodes: Mapping[str, Branch], main: Mapping[str, float | None]) -> set[str]:
    """The ids of all turns with a reward, on themselves or on a turn below."""
    found: set[str] = set()
    for name, node in reversed(list(nodes.items())):  # children before parents
        if main[name] is not None or name in found:
            found.add(name)
            if node.parent is not None:
                found.add(node.parent.interaction.id)
    return found


def _answers(nodes: Mapping[str, Branch], rewarded: set[str]) -> Iterable[list[Branch]]:
    """The rewarded answers to each prompt that has several."""
    # The state hash is that of the messages after the parent's answer, so with the parent it names the prompt.
    asked: dict[tuple[str | None, str | None], list[Branch]] = defaultdict(list)
    for node in nodes.values():
        if node.interaction.id in rewarded:
            asked[node.interaction.parent_id, node.interaction.state_hash].append(node)
    return [answers for answers in asked.values() if len(answers) > 1]


def _one_after_the_other(answers: Sequence[Branch]) -> Iterator[tuple[Branch, Branch]]:
    """Each answer in the order in which they began, with the one of those before it that was complete last."""
    begun = sorted(answers, key=lambda node: node.interaction.created_at)
    latest = begun[0]
    for node in begun[1:]:
        yield latest, node
        latest = max(latest, node, key=lambda each: each.interaction.completed_at or 0.0)


def _pair(earlier: Branch, later: Branch) -> Pair:
    return Pair(earlier.interaction.id, later.interaction.id)


def _request(node: Branch) -> str:
    """The request of an answer: its choices after the first have `.1`, `.2`, ... behind the id of the first."""
    return node.interaction.id.partition(".")[0]
