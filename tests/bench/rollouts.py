"""The rollouts that every arm of the GPU bench runs, and their measurements; the same seed gives the same texts.

Times come from the monotonic clock, which all processes of a machine share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from tests.bench.load import Words


@dataclass(frozen=True, slots=True)
class Workload:
    """Concurrent sessions of `turns` turns. Characters: of the first user message, and of each later one."""

    sessions: int
    turns: int
    reply_tokens: int
    first_characters: int
    later_characters: int

    @property
    def most_tokens(self) -> int:
        """Tokens that all sessions may hold at their end; no text has more tokens than characters, template aside."""
        later = self.reply_tokens + self.later_characters + 100
        return self.sessions * (self.first_characters + self.turns * later)

    def texts(self, seed: int, session: int) -> list[str]:
        """Return the user messages of one session."""
        words = Words(seed * 1_000_003 + session)
        return [words.text(self.later_characters if turn else self.first_characters) for turn in range(self.turns)]


@dataclass(frozen=True, slots=True)
class Arm:
    """One run over a workload. `name` tells its sessions from those of other arms; `stream`: token by token."""

    name: str
    stream: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn. `first_ns` is when its first token was there, 0 where replies come whole."""

    session: int
    turn: int
    begun_ns: int
    first_ns: int
    ended_ns: int
    prompt_tokens: int
    cached_tokens: int
    reply_tokens: int

    def to_row(self) -> list[int]:
        return [int(value) for value in astuple(self)]


def tokens_a_second(replies: Sequence[Reply]) -> float:
    """Return the sampled tokens divided by the time from the first request to the last token of all sessions."""
    duration_ns = max(reply.ended_ns for reply in replies) - min(reply.begun_ns for reply in replies)
    return sum(reply.reply_tokens for reply in replies) / duration_ns * 1e9


def first_token_ms(replies: Sequence[Reply], share: float) -> float | None:
    """Return a quantile of the time to the first token over turns after the first; None for whole replies."""
    waits = sorted(reply.first_ns - reply.begun_ns for reply in replies if reply.first_ns and reply.turn)
    return waits[min(len(waits) - 1, int(share * len(waits)))] / 1e6 if waits else None


def hit_rates(replies: Sequence[Reply]) -> tuple[float, float]:
    """Return cached prompt tokens of turns after the first, as shares of all and of those that could be cached."""
    before = {(reply.session, reply.turn): reply for reply in replies}
    later = [reply for reply in replies if reply.turn]
    left = [before[reply.session, reply.turn - 1] for reply in later]
    cached = sum(reply.cached_tokens for reply in later)
    reusable = sum(reply.prompt_tokens + reply.reply_tokens for reply in left)
    return cached / sum(reply.prompt_tokens for reply in later), cached / reusable
