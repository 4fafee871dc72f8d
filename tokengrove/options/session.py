"""The options of sessions: the words that describe one, and what filters choose them by."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tokengrove.options.option import Conditions, NumberCondition, option
from tokengrove.reasons import Segment

SESSIONS = "Which sessions and turns"


class SessionStatus(StrEnum):
    """The state of a session. `expired`: ended by the server because it was idle."""

    ACTIVE = "active"
    ENDED = "ended"
    EXPIRED = "expired"


class Outcome(StrEnum):
    """How an episode ended, as the environment reported it when it ended the session."""

    FINISHED = "Finished"
    FAILED = "Failed"
    NO_DATA = "NoData"
    TIMEOUT = "Timeout"


class Credit(StrEnum):
    """How a reward flows back: to the ancestors in the tree, to all interactions completed earlier, or to the ancestors
    in the tree and in the conversations that it came from (`lineage`)."""

    TREE = "tree"
    LINEAR = "linear"
    LINEAGE = "lineage"


class RewardScope(StrEnum):
    """Which rewards are summed into a sample's reward: those of its session, of its path, or of its agent's turns
    anywhere in the session.
    """

    SESSION = "session"
    PATH = "path"
    AGENT = "agent"


class Purpose(StrEnum):
    """`main`: the agent's own work. `aux`: a side call that is not a title, summary or sub-agent call."""

    MAIN = "main"
    TITLE = "title"
    SUMMARY = "summary"
    SUBAGENT = "subagent"
    AUX = "aux"


class Validation(StrEnum):
    """What happens to validation sessions, whose metadata says `validate: true`."""

    SKIP = "skip"
    INCLUDE = "include"
    ONLY = "only"


@dataclass(frozen=True, kw_only=True)
class StoredFilter:
    """Which sessions to select, in exports, claims and listings. A session has to meet all conditions."""

    group_id: str | None = option(None, "Only sessions of this group.", panel=SESSIONS, flag="group")
    task_id: str | None = option(None, "Only sessions of this task.", panel=SESSIONS, flag="task")
    status: SessionStatus | None = option(None, "Only sessions of this status.", panel=SESSIONS)
    outcome: Outcome | None = option(None, "Only sessions of this outcome.", panel=SESSIONS)
    since: float | None = option(
        None,
        "Only sessions that ended at this time or later, and live ones.",
        unit="Unix seconds",
        panel=SESSIONS,
    )
    metadata: Conditions | None = option(None, "Only sessions with this metadata.", panel=SESSIONS)
    metrics: Conditions | None = option(None, "Only sessions with this metric.", panel=SESSIONS, flag="metric")
    rewarded: bool | None = option(None, "Only sessions with, or without, a reward.", panel=SESSIONS)
    validation: Validation | None = option(
        None,
        "What to do with sessions whose metadata has `validate: true`.",
        otherwise="skip, but include where sessions are named",
        panel=SESSIONS,
    )


@dataclass(frozen=True, kw_only=True)
class SessionFilter(StoredFilter):
    """Which sessions, turns and samples to select, in exports and claims.

    `purpose`, `agent` and `lineage` select turns. `min_version` and `max_version_span` leave out samples that are too
    stale to train on; an export with `stale: mask` masks tokens older than `min_version` instead. These five apply to
    samples, so a claim takes them only together with `export`.
    """

    purpose: frozenset[Purpose] | None = option(None, "Only turns of these purposes.", panel=SESSIONS)
    agent: frozenset[str] | None = option(None, "Only turns of these agents.", panel=SESSIONS)
    lineage: frozenset[Segment] | None = option(
        None, "Only turns of conversations that came about in these ways.", panel=SESSIONS
    )
    min_version: int | None = option(
        None, "Only samples whose trained tokens all have at least this weight version.", least=0, panel=SESSIONS
    )
    max_version_span: int | None = option(
        None, "Only samples whose trained tokens span at most this many weight versions.", least=0, panel=SESSIONS
    )


@dataclass(frozen=True, kw_only=True)
class ListingFilter(StoredFilter):
    """Which sessions to list."""

    session_ids: tuple[str, ...] | None = option(None, "Only these sessions, at most 1000.")
    reward: NumberCondition | None = option(None, "Only sessions of this score.")
    turns: NumberCondition | None = option(None, "Only sessions with this number of complete turns.")
    forks: NumberCondition | None = option(None, "Only sessions with this number of turns that went back.")
    lost: NumberCondition | None = option(None, "Only sessions with this number of failed and aborted calls.")
    tokens: NumberCondition | None = option(
        None, "Only sessions with this number of prompt and sampled tokens, over all complete turns."
    )
    prompt_tokens: NumberCondition | None = option(None, "The same, prompt tokens only.")
    output_tokens: NumberCondition | None = option(None, "The same, sampled tokens only.")
    duration: NumberCondition | None = option(
        None, "Only sessions of this many seconds from the start to the end, or to the last change."
    )
    version: NumberCondition | None = option(None, "Only sessions that began at this weight version.")
    trained_in: str | None = option(
        None,
        "Only sessions with a turn in this step of a trainer: `TRAINER/STEP`.",
        note="[Annotations](#post-trajectoriesannotate).",
    )
    forked: bool | None = option(None, "Only sessions with, or without, a turn that went back.")
    search: str | None = option(
        None, "Only sessions whose id, task or group contains this text, in any case of ASCII letters."
    )
    text: str | None = option(
        None,
        'Only sessions with a turn that has all these words and "phrases", in any case of letters. Needs `--search`.',
    )
    purpose: Purpose | None = option(None, "Only sessions with a turn of this purpose.")
    withdrawn: bool | None = option(
        None,
        "Only withdrawn sessions, or none of them.",
        otherwise="both; in counts of groups none",
        note="[Withdrawn](#post-sessionrlwithdraw_session).",
    )
