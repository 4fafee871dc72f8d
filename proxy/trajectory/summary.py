"""A summary of a session: counts of its turns, its score and its returns, as an export would compute them.

A summary depends only on the turns and the record, so it can be kept until one of them changes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, sqrt
from typing import TYPE_CHECKING, NamedTuple

from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.lineage import lineages_of
from proxy.trajectory.purpose import derive_purposes
from proxy.trajectory.routes import trained_turns
from proxy.trajectory.scored_session import scored_session
from proxy.types import Outline, SessionRecord
from tokengrove.options.model import RouteKind
from tokengrove.reasons import Reason, Status

if TYPE_CHECKING:
    Values = array[float]
else:  # array.array takes no type argument at run time before Python 3.12
    Values = array
from typing import Any

from proxy.types import Interaction

NO_FORKS = frozenset({Reason.FIRST, Reason.CONTINUED, Reason.NEW_ROOT})
"""The reasons of turns that continue a conversation or begin a new one. A turn with any other reason is a fork."""

_MOST_AGENTS = 20
_LIKE_EXPORTS = LayoutOptions()


class Spread(NamedTuple):
    """The distribution of numbers. `std` divides by n - 1, as advantages do; None for fewer than two numbers."""

    mean: float
    std: float | None
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One session. Counts are of turns; `reasons`, `purposes` and the sums of tokens include only complete turns.

    `score`: the score of its samples; None: nothing was rewarded. It sums the rewards of all trained routes. `returns`:
    the returns of the complete turns of trained routes in order of completion, under the session's own rule; zeros
    without rewards. `agents`: at most 20, in order of appearance. `routes`: as in
    `certificate`.
    """

    turns: int
    failed: int
    aborted: int
    superseded: int
    forks: int
    reasons: Mapping[str, int]
    prompt_tokens: int
    output_tokens: int
    score: float | None
    rewarded: bool
    returns: Values
    versions: tuple[int, int] | None
    purposes: Mapping[str, int]
    agents: tuple[str, ...]
    routes: Mapping[str, Any] = field(default_factory=dict)


def summarise(record: SessionRecord, outline: Outline) -> Summary:
    """Summarise a session from its record and all of its turns."""
    counts = certificate(record, outline.steps)
    trained = trained_turns(outline.steps)
    scored = scored_session(record, trained, _LIKE_EXPORTS)
    purposes = scored.purposes if len(trained) == len(outline.steps) else derive_purposes(outline.steps)
    complete = [step for step in outline.steps if step.status is Status.COMPLETE]
    agents = dict.fromkeys(step.agent for step in complete if step.agent is not None)
    return Summary(
        turns=len(complete),
        failed=counts["failed"],
        aborted=counts["aborted"],
        superseded=counts["superseded"],
        forks=sum(step.reason not in NO_FORKS for step in complete),
        reasons=counts["reasons"],
        prompt_tokens=outline.prompt_tokens,
        output_tokens=outline.output_tokens,
        score=scored.scores.score,
        rewarded=counts["rewarded"],
        returns=array("d", [scored.returns[step.id] for step in complete if step.id in scored.returns]),
        versions=outline.versions,
        purposes=Counter(str(purpose) for purpose in purposes.values()),
        agents=tuple(agents)[:_MOST_AGENTS],
        routes=counts.get("routes", {}),
    )


def spread(values: Sequence[float]) -> Spread | None:
    """The distribution of `values`; None if there are none."""
    if not values:
        return None
    count, mean = len(values), fsum(values) / len(values)
    squares = fsum((value - mean) ** 2 for value in values)
    return Spread(mean, sqrt(squares / (count - 1)) if count > 1 else None, min(values), max(values))


def version_range(ranges: Iterable[tuple[int, int] | None]) -> tuple[int, int] | None:
    """The least and the greatest version of several ranges; None if all are None."""
    known = [each for each in ranges if each is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None


def certificate(record: SessionRecord, interactions: Sequence[Interaction], begun_not_ended: int = 0) -> dict[str, Any]:
    """A session's entry in an export. `complete` is False if calls failed, were aborted or began and never ended.

    `unaligned` counts interactions whose prompt does not begin with their parent's tokens; `reasons` counts complete
    interactions by reason. `routes`: the kind of each route and the number of its complete turns; absent without a
    table of models. Turns of kind external are not in samples, because they have no tokens. `lineage`: which earlier
    turns conversations came from; absent if none did.
    """
    counts = {status: sum(i.status is status for i in interactions) for status in Status}
    complete = [i for i in interactions if i.status is Status.COMPLETE]
    reasons: dict[str, int] = {}
    for interaction in complete:
        reasons[interaction.reason.value] = reasons.get(interaction.reason.value, 0) + 1
    lost = begun_not_ended + counts[Status.FAILED] + counts[Status.ABORTED]
    routes = _routes(interactions)
    lineage = lineages_of(complete)
    return {
        "session_id": record.session_id,
        "group_id": record.group_id,
        "task_id": record.task_id,
        "status": record.status.value,
        "complete": lost == 0,
        "begun_not_ended": begun_not_ended,
        "aborted": counts[Status.ABORTED],
        "superseded": counts[Status.SUPERSEDED],
        "failed": counts[Status.FAILED],
        "reasons": reasons,
        "unaligned": sum(map(is_unaligned, complete)),
        "rewarded": any(i.reward is not None or i.rewards or i.token_rewards for i in complete),
        "outcome": record.outcome.value if record.outcome else None,
        "finished": record.finished,
        "metrics": dict(record.metrics),
        "metadata": dict(record.metadata),
        **({"routes": routes} if routes else {}),
        **({"lineage": lineage} if lineage else {}),
    }


def is_unaligned(interaction: Interaction) -> bool:
    """Whether a turn has tokens that could not be joined to its parent's. External turns have none."""
    external = interaction.route_kind is RouteKind.EXTERNAL
    return interaction.parent_id is not None and not interaction.aligned and not external


def _routes(interactions: Iterable[Interaction]) -> dict[str, dict[str, Any]]:
    """The kind of each named route of a session, and the number of its complete turns."""
    found: dict[str, dict[str, Any]] = {}
    for each in interactions:
        if each.route:
            entry = found.setdefault(each.route, {"kind": each.route_kind.value, "turns": 0})
            entry["turns"] += each.status is Status.COMPLETE
    return found
