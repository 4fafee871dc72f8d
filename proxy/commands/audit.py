"""`tokengrove db check`: checks the invariants of stored sessions, from the database alone, and changes nothing.

It checks checksums, lengths of arrays, the order of `seq`, parents, alignment with the parent, that each token is
trained exactly once, returns, ends, begun calls, images and side columns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from proxy.side_columns.columns import DECLARED
from proxy.store.inspection import BROKEN, Broken, Inspection, Stored
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import export_session
from proxy.trajectory.returns import compute_returns
from proxy.trajectory.routes import trained_turns
from proxy.trajectory.selection import marked
from proxy.types import Interaction, SessionRecord
from tokengrove.options.export import Layout, TrainSelection
from tokengrove.options.session import SessionStatus
from tokengrove.reasons import Reason, Status

# A logprob comes from a float32 log-softmax, and rounding may lift it above 0.
_LOGPROB_SLACK = 1e-4
_RETURN_SLACK = 1e-9
_REASONS = frozenset(Reason)


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken invariant and its place. `session_id` None: the finding concerns the whole database."""

    session_id: str | None
    interaction_id: str | None
    what: str
    turn: int | None = None

    def __str__(self) -> str:
        where = [f"session {self.session_id}"] if self.session_id is not None else []
        where += [f"turn {self.turn}"] if self.turn is not None else []
        where += [f"interaction {self.interaction_id}"] if self.interaction_id is not None else []
        told = ": ".join([", ".join(where), self.what]) if where else self.what
        return told.encode("utf-8", "backslashreplace").decode()  # damaged texts cannot be printed


@dataclass(slots=True)
class Audit:
    """Counts of the checked data, and the findings. `begun_not_ended` calls are not a fault, since a crash leaves some.

    `unsummed`: the number of checksums that rows of older servers lack. `filled`: the number that were added.
    `dropped`: the number of side columns that turns recorded and that are not stored, which is not a fault either.
    """

    sessions: int = 0
    interactions: int = 0
    output_tokens: int = 0
    begun_not_ended: int = 0
    unsummed: int = 0
    filled: int = 0
    dropped: int = 0
    findings: list[Finding] = field(default_factory=list)


def audit(
    inspection: Inspection,
    session_id: str | None = None,
    progress: Callable[[int, int], None] = lambda *_: None,
    fill: Callable[[Stored], int] = lambda _: 0,
) -> Audit:
    """Check every session, or only `session_id`. Raises ConfigurationError if it does not exist.

    `progress` is called with the numbers of sessions and interactions checked so far. `fill` is called with each
    session without findings, and returns the number of checksums that it has added.
    """
    result = Audit()
    if session_id is None:
        result.findings += [Finding(None, None, fault) for fault in inspection.faults()]
    for stored in inspection.sessions(session_id):
        result.sessions += 1
        result.interactions += len(stored.interactions)
        result.output_tokens += sum(len(node.output_ids) for node in _whole(stored))
        result.begun_not_ended += len(stored.begun - stored.existing)
        result.dropped += _dropped(stored)
        found = check_session(stored)
        result.findings += found
        result.unsummed += sum(map(len, stored.missing.values()))
        if not found:
            result.filled += fill(stored)
        progress(result.sessions, result.interactions)
    return result


def check_session(stored: Stored) -> list[Finding]:
    """All broken invariants of one session."""
    broken = [each for each in (stored.record, *stored.interactions) if isinstance(each, Broken)]
    found = [(None if each is stored.record else each.id, f"cannot be decoded: {each.why}") for each in broken]
    found += stored.unlike
    checks = [_check_order, _check_nodes, _check_parents, _check_reasons, _check_end, _check_begun, _check_images]
    checks.append(_check_columns)
    if not broken:
        checks += [_check_trained_once, _check_returns]
    for check in checks:
        try:
            found += check(stored)
        except BROKEN as error:  # of values of a wrong type
            found.append((None, f"cannot be checked: {type(error).__name__}: {error}"))
    return [Finding(stored.session_id, name, what, stored.turns.get(name or "")) for name, what in found]


T = TypeVar("T")
Faults = Iterator[tuple[str | None, str]]
"""Pairs of an interaction id (None: the session itself) and its fault."""


def _whole(stored: Stored) -> list[Interaction]:
    return [node for node in stored.interactions if isinstance(node, Interaction)]


def _complete(stored: Stored) -> list[Interaction]:
    return [node for node in _whole(stored) if node.status is Status.COMPLETE]


def _check_order(stored: Stored) -> Faults:
    """The seqs of a session are 0, 1, 2, ... without a gap."""
    if any(isinstance(node, Broken) for node in stored.interactions):
        return
    seqs = [node.seq for node in _whole(stored)]
    if len(seqs) != stored.next_seq or seqs != list(range(len(seqs))):
        yield None, f"next_seq is {stored.next_seq}, but the seqs are {_short(seqs)}"


def _check_nodes(stored: Stored) -> Faults:
    """A node has as many logprobs and versions as output ids, and all values are valid."""
    for node in _complete(stored):
        length, versions = len(node.output_ids), sum(count for count, _ in node.versions)
        if not length == len(node.logprobs) == versions:
            yield node.id, f"{length} output ids, {len(node.logprobs)} logprobs, {versions} versions"
        if not all(math.isfinite(value) and value <= _LOGPROB_SLACK for value in node.logprobs):
            yield node.id, "a logprob is not finite or above 0"
        unmasked = node.unmasked_logprobs
        if unmasked is not None and (len(unmasked) != length or not all(map(math.isfinite, unmasked))):
            yield node.id, f"its unmasked logprobs are not {length} finite numbers"
        if min((*node.prompt_suffix, *node.output_ids), default=0) < 0:
            yield node.id, "a token id is negative"


def _check_parents(stored: Stored) -> Faults:
    """A parent is an earlier complete interaction of the session and of the same route.

    An aligned node begins with its parent's tokens.
    """
    complete = {node.id: node for node in _complete(stored)}
    for node in complete.values():
        if node.parent_id is None:
            if node.aligned or node.prefix_length:
                yield node.id, "it is aligned with a parent, but has none"
            continue
        parent = complete.get(node.parent_id)
        if parent is None or parent.seq >= node.seq:
            yield node.id, f"its parent {node.parent_id} is not an earlier complete interaction of the session"
            continue
        if parent.route != node.route:
            yield node.id, f"its parent {node.parent_id} is of route {parent.route!r}, not of its own, {node.route!r}"
        expected = parent.prompt_tokens + len(parent.output_ids) if node.aligned else 0
        if node.prefix_length != expected:
            yield (
                node.id,
                f"its prefix has {node.prefix_length} tokens, but its parent has {expected}",
            )


def _check_reasons(stored: Stored) -> Faults:
    """All reasons are known. One root has the reason `first`, and at most one child of a parent has `continued`."""
    complete = _complete(stored)
    for node in complete:
        if node.reason not in _REASONS:
            yield node.id, f"its reason {node.reason.value!r} is unknown, at least to this version"
    firsts = [node for node in complete if node.reason is Reason.FIRST]
    if complete and (len(firsts) != 1 or firsts[0].parent_id is not None):
        yield None, f"{len(firsts)} interactions have the reason 'first'; it must be one root"
    continued = Counter(node.parent_id for node in complete if node.reason is Reason.CONTINUED)
    for parent_id, count in continued.items():
        if count > 1 or parent_id is None:
            yield parent_id, f"{count} interactions have the reason 'continued' under this parent; it may be one"


def _check_end(stored: Stored) -> Faults:
    """An ended session has an end time and a place in the order of ends. A live session has neither."""
    if isinstance(stored.record, Broken):
        return
    ended = stored.record.status is not SessionStatus.ACTIVE
    if (stored.record.ended_at is not None) != ended or (stored.ended_order is not None) != ended:
        at, order = stored.record.ended_at, stored.ended_order
        yield None, f"it is {stored.record.status}, with ended_at {at} and ended_order {order}"


def _check_begun(stored: Stored) -> Faults:
    """A call with a stored interaction is not noted as begun."""
    for name in sorted(stored.existing):
        yield name, "it is stored, but still noted as begun and not ended"


def _check_images(stored: Stored) -> Faults:
    """Each image is stored. Its tokens are prompt tokens that the node adds, and do not overlap with other images.

    A turn that failed during an outage of the database may lack the images of its messages.
    """
    for node in _whole(stored):
        named = {image.digest for image in node.images}
        if node.status is Status.COMPLETE:
            named |= {part.digest for message in node.new_messages for part in message.images}
        for digest in sorted(named - stored.images):
            yield node.id, f"its image {digest} is not stored"
        end = node.prefix_length
        for image in node.images:
            if image.start < end or image.length < 1:
                yield (
                    node.id,
                    f"its image {image.digest} begins at token {image.start}, before token {end} or with none",
                )
            end = image.start + image.length
        if node.images and end > node.prompt_tokens:
            yield node.id, f"its images end at token {end}, but its prompt has {node.prompt_tokens}"


def _check_columns(stored: Stored) -> Faults:
    """A side column is as it was written, belongs to a turn, and has the rows that the turn says."""
    nodes = {node.id: node for node in _whole(stored)}
    broken = {each.id for each in stored.interactions if isinstance(each, Broken)}
    for column in stored.columns:
        name, of = f"its column {column.name}", column.interaction_id
        if column.fault is not None:
            yield of, f"{name} {column.fault}"
        elif of in nodes and column.missing is not None:
            node, declared = nodes[of], DECLARED[column.name]
            start, end = declared.span(node.prefix_length, node.prompt_tokens, len(node.output_ids))
            if (column.start, column.end) != (start, end):
                yield of, f"{name} has rows of tokens {column.start} to {column.end}, not of {start} to {end}"
            elif (noted := node.replay.get(column.name)) != column.missing:
                yield of, f"{name} lacks {column.missing} rows, but its notes say {noted}"
        elif of not in nodes and of not in broken:
            yield of, f"{name} belongs to no interaction of the session: prune"


def _dropped(stored: Stored) -> int:
    """How many side columns the turns recorded that are not stored."""
    there = {(column.interaction_id, column.name) for column in stored.columns}
    count = 0
    for node in _whole(stored):
        for name, missing in node.replay.items():
            if (node.id, name) not in there and name in DECLARED:
                start, end = DECLARED[name].span(node.prefix_length, node.prompt_tokens, len(node.output_ids))
                count += missing < end - start  # otherwise there was no row to store
    return count


def _check_trained_once(stored: Stored) -> Faults:
    """In a concat export, each sampled token is trained exactly once, unless it was marked as not trainable."""
    record, nodes = stored.record, _whole(stored)
    assert isinstance(record, SessionRecord)
    options = LayoutOptions(layout=Layout.CONCAT, train=TrainSelection(constrained=True))
    samples, failed = _attempt(lambda: export_session(record, nodes, options))
    if failed:
        yield None, f"it cannot be exported: {failed}"
        return
    trained = sum(int(sample.arrays.loss_mask.sum()) for sample in samples or ())
    trainable = [node for node in trained_turns(nodes) if node.status is Status.COMPLETE and node.has_logprobs]
    expected = sum(int(marked(node).sum()) for node in trainable)
    if trained != expected:
        yield None, f"a concat export trains {trained} tokens, but {expected} sampled tokens are trainable"


def _check_returns(stored: Stored) -> Faults:
    """The stored returns of an ended session match its rewards."""
    record = stored.record
    assert isinstance(record, SessionRecord)
    if record.status is SessionStatus.ACTIVE:
        return
    values, failed = _attempt(lambda: compute_returns(_whole(stored), record.discount, record.credit))
    if failed:
        yield None, f"its returns cannot be computed: {failed}"
    for name, value in (values or {}).items():
        kept = stored.returns.get((name, record.discount, record.credit))
        if kept is None or not math.isclose(kept, value, rel_tol=_RETURN_SLACK, abs_tol=_RETURN_SLACK):
            yield name, f"its stored return is {kept}, but its rewards give {value}"


def _attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result, or the error that a damaged tree causes."""
    try:
        return work(), None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"


def _short(values: Sequence[int]) -> str:
    return f"{list(values)}" if len(values) <= 20 else f"{list(values[:20])} and {len(values) - 20} more"
