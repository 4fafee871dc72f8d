"""The summary of an export, counted page by page from the samples. The numbers are the same in every format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tokengrove.client.forest import PackedSequence
from tokengrove.client.readers.page import Page
from tokengrove.client.values import Sample

_INDIVIDUAL = ("individual", "step")
_EXPECTED = ("first", "continued")


@dataclass(slots=True)
class Tally:
    """Sums over the pages that were written.

    `validation`, `withdrawn`: sessions that match but were left out, because they are for validation or were withdrawn.
    `uncounted`: why pages could not be read, or None. If it is set, the fields after it are 0.
    `tokens`: tokens of all samples, without padding; `trained`: those with loss mask 1.
    `forks`: samples beyond one per session; in layout tree, leaves beyond one; in layout individual, turns that neither
    start nor continue a conversation.
    `unaligned`: turns whose prompt could not be joined with the previous turn.
    `dropped`, `cut`: in layout padded, samples that did not fit and tokens that were cut off. `sequences`: in layout
    forest, those that the samples are packed into; `row_tokens`: the tokens that the samples have alone.
    `masked`: sampled tokens that are in no sample as they were sampled.
    `unrewarded`: sessions without a reward; `left_out`: sessions without samples, because they have no reward, are live
    or failed.
    `scores`: the score of each rewarded session.
    `untrained`: sampled tokens that are not trained, by reason. `warnings`: warnings of the sessions.
    """

    sessions: int = 0
    validation: int = 0
    withdrawn: int = 0
    incomplete: int = 0
    files: int = 0
    size: int = 0
    uncounted: str | None = None
    samples: int = 0
    sequences: int = 0
    row_tokens: int = 0
    tokens: int = 0
    trained: int = 0
    forks: int = 0
    unaligned: int = 0
    dropped: int = 0
    cut: int = 0
    masked: int = 0
    unrewarded: int = 0
    left_out: int = 0
    scores: list[float] = field(default_factory=list)
    untrained: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)

    def count(self, page: Page, layout: str) -> None:
        """Add the counts of one page."""
        samples, entries = page.samples, page.sessions.values()
        self.samples += len(samples) + sum(len(each.rows) for each in page.sequences)
        self.sequences += len(page.sequences)
        self.row_tokens += sum(each.row_tokens for each in page.sequences)
        self.tokens += sum(map(len, page.sequences))
        self.trained += sum(int(each.loss_mask.sum()) for each in page.sequences)
        self.tokens += sum(int(sample.attention_mask.sum()) for sample in samples)
        self.trained += sum(int(sample.loss_mask.sum()) for sample in samples)
        self.scores += [entry["score"] for entry in entries if entry["score"] is not None]
        self.unrewarded += sum(entry["score"] is None for entry in entries)
        self.left_out += sum(entry["left_out"] is not None for entry in entries)
        self.unaligned += sum(entry["unaligned"] for entry in entries)
        self.dropped += sum(entry.get("dropped_samples", 0) for entry in entries)
        self.masked += sum(entry["masked_tokens"] for entry in entries)
        for name, entry in page.sessions.items():
            self.untrained.update(entry["untrained_tokens"])
            self.warnings += [f"session {name}: {text}" for text in entry["warnings"]]
        self.cut += sum(sample.extra.get("truncated_tokens", 0) for sample in samples)
        self.forks += _branches(page) if layout in _INDIVIDUAL else _beyond_one(samples)
        self.forks += sum(len(each.rows) for each in page.sequences) - len(_sessions(page.sequences))

    @property
    def nothing(self) -> str:
        """The message if no session was exported."""
        return "no session matches" + (
            f", but {self.validation} for validation: --validation include exports them" if self.validation else ""
        )

    def rows(self, layout: str) -> Iterator[tuple[str, str]]:
        """Yield the rows of the summary: name and value."""
        yield "sessions", str(self.sessions) if self.sessions else self.nothing
        if self.sessions and self.validation:
            yield "validation", f"{self.validation} sessions left out; --validation include exports them"
        if self.withdrawn:
            yield "withdrawn", f"{self.withdrawn} sessions left out; --session exports them"
        if self.uncounted is None:
            yield from self._counted(layout)
        else:
            yield "samples", f"not counted: {self.uncounted}"
        missing = self.incomplete
        yield "complete", "all" if not missing else f"{self.sessions - missing}; {missing} lack a call"

    def _counted(self, layout: str) -> Iterator[tuple[str, str]]:
        mean = sum(self.scores) / len(self.scores) if self.scores else None
        yield "samples", str(self.samples)
        yield "tokens", str(self.tokens)
        if self.sequences:
            shared = 1 - self.tokens / max(self.row_tokens, 1)
            yield "sequences", f"{self.sequences}; {self.row_tokens} tokens in the samples, {shared:.0%} fewer in these"
        yield "trained tokens", str(self.trained)
        yield "mean reward", "none" if mean is None else f"{mean:.4f}"
        if self.unrewarded or self.left_out:
            yield "unrewarded", f"{self.unrewarded} sessions have no reward; {self.left_out} sessions are left out"
        kinds = {"tree": "leaves beyond one a session"} | dict.fromkeys(_INDIVIDUAL, "turns that branch off")
        what = kinds.get(layout, "samples beyond one a session")
        yield (
            "forks",
            f"{self.forks} {what}, {self.unaligned} turns unaligned",
        )
        if self.dropped or self.cut:
            yield "too long", f"{self.dropped} samples dropped, {self.cut} tokens cut"
        if self.masked:
            yield "masked", f"{self.masked} sampled tokens are in no sample as sampled"
        if self.untrained:
            counts = ", ".join(f"{count} {reason}" for reason, count in self.untrained.most_common())
            yield "not trained", f"{self.untrained.total()} sampled tokens: {counts}"
        if self.warnings:
            yield "warnings", f"{len(self.warnings)}, the first: {self.warnings[0]}"


def _branches(page: Page) -> int:
    reasons = [entry["reasons"] for entry in page.sessions.values()]
    return sum(count for counts in reasons for reason, count in counts.items() if reason not in _EXPECTED)


def _sessions(sequences: list[PackedSequence]) -> set[str]:
    return {row["session_id"] for each in sequences for row in each.rows}


def _beyond_one(samples: list[Sample]) -> int:
    leaves = sum(_leaves(sample) for sample in samples)
    return leaves - len({sample.session_id for sample in samples})


def _leaves(sample: Sample) -> int:
    """Number of leaves: 1 for a sequence; for a tree, the number of nodes without children."""
    if "node_parents" not in sample.extra:
        return 1
    parents = sample.extra["node_parents"].tolist()
    return len(parents) - len(set(parents) - {-1})
