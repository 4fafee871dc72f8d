"""The end of a turn: prove its alignment and commit it, or record its failure.

A turn becomes visible only after its commit is durable. The choices of one reply are committed in the order of their
indexes, once all have ended, so `seq` is the order of the turns. A failed turn is stored with its status and its
sampled tokens. It never becomes a parent, and exports only count it.

Commits use optimistic locking: if another replica has changed the session, the turn is placed and committed again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from proxy.images.image_pool import ImagePool
from proxy.resources.places import Places
from proxy.sessions.attempts import Stage
from proxy.sessions.live_session import LiveSession, deleted
from proxy.sessions.registry import Registry
from proxy.sessions.replica import note_commit, note_doubt
from proxy.store.turn_log import TurnLog
from proxy.telemetry.families import Seen, observe_all
from proxy.telemetry.groups import TurnMetrics
from proxy.trajectory.cache import Node
from proxy.trajectory.lineage import BEGUN, SEARCHED, lineage_of
from proxy.trajectory.summary import is_unaligned
from proxy.turns.turn import Turn
from proxy.types import Api, ImageFile, Interaction, Lineage
from tokengrove.errors import EngineFailed, InvalidRequest, ProxyError, SessionNotFound, StoreUnavailable, brief
from tokengrove.options.start import EpisodeCut
from tokengrove.reasons import FinishReason, Reason, Status

logger = logging.getLogger(__name__)

# The maximum number of failed turns, each with its sampled tokens, that are kept while the database is unavailable. At
# this number no turn starts, because it could not be committed either.
_MOST_UNRECORDED = 1000
_RECORD_EVERY_S = 1.0
# A failed turn that was not retried within this time is recorded.
_RETRIED_WITHIN_S = 60.0


class Commits:
    """Commits ended turns. `in_background` starts a task that the shutdown waits for."""

    def __init__(
        self,
        log: TurnLog,
        registry: Registry,
        metrics: TurnMetrics,
        images: ImagePool,
        places: Places,
        in_background: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._log, self._registry, self._metrics = log, registry, metrics
        metrics.ended.expect(product(Api, (Status.COMPLETE, Status.FAILED, Status.ABORTED)))
        metrics.interactions.expect((reason,) for reason in Reason)
        self._images, self._places, self._in_background = images, places, in_background
        self._unrecorded: deque[Turn] = deque()
        metrics.unrecorded.watch(self._unrecorded.__len__)
        self._record_at = 0.0
        self._recording = False

    async def complete(self, turn: Turn, finish: FinishReason) -> Interaction:
        """Commit a turn that the engine finished. Raises EngineFailed if the engine aborted it, or StoreUnavailable."""
        interaction, session = turn.interaction, turn.session
        if finish is FinishReason.ABORT:
            raise EngineFailed("the engine aborted this reply")
        if last := turn.parser.finish():
            turn.publish(last)
        self._describe(turn, finish)
        turn.prove()
        if turn.columns is not None:
            turn.recorded = turn.side_columns()
        if turn.order is not None:
            # The choice is completely sampled, so it is kept even if the choices that it waits for are cancelled.
            turn.committing = True
            self._places.give_back(turn.request.sender)  # the choices that it waits for may need it
            turn.placed = False
            await turn.order.pass_through(turn.index)
            await self._places.take(turn.request.sender)
            turn.placed = True
        if self._registry.shared:
            # This replica commits one turn of a session at a time, so only another replica can cause a conflict.
            async with session.committing:
                node = await self._commit(turn)
        else:
            node = await self._commit(turn)
        self._committed(turn, node)
        return interaction

    async def _commit(self, turn: Turn) -> Node:
        """Commit a turn. If another replica commits first, refresh the session, decide the reason again and retry."""
        turn.committing = True  # no longer cancelled: the commit may already be durable
        turn.timeline.commit_begun = time.monotonic()
        try:
            while (node := await self._place(turn)) is None:
                turn.timeline.note("overtaken")  # by another replica
                await self._registry.refresh(turn.session)
        except ProxyError as error:
            turn.committing = False
            if isinstance(error, SessionNotFound):
                if turn.session.confirmed:
                    self._registry.forget_deleted(turn.session)
                    raise deleted(turn.session.id) from None
                raise StoreUnavailable(f"session {brief(turn.session.id)} could not be stored; try again") from None
            raise
        return node

    def begun(self, turn: Turn) -> EpisodeCut | None:
        """What an uncommitted turn begins; None: it goes on with a conversation, or begins a side one."""
        if turn.prompt.match.parent is not None or self._reason(turn) not in BEGUN:
            return None
        found = _lineage(turn)
        kind = EpisodeCut.NEW.value if found is None else found.kind.value
        return EpisodeCut(kind) if kind in list(EpisodeCut) else None

    async def _place(self, turn: Turn) -> Node | None:
        """Place a turn in the tree and commit it. Return None if another replica has changed the session."""
        interaction, session, prompt = turn.interaction, turn.session, turn.prompt
        interaction.reason = self._reason(turn)
        if prompt.match.parent is None and interaction.reason in BEGUN:
            interaction.lineage = _lineage(turn)
        node = session.cache.node_for(interaction, prompt.identity, prompt.match, prompt.ids, prompt.images)
        session.cache.reserve(node)
        try:
            files = await self._files(turn) if interaction.images else ()
            seen = session.seen if self._registry.shared else None
            seq = await self._log.append(interaction, seen, files, turn.recorded)
        except ProxyError:
            session.cache.release(node)
            note_doubt(session, interaction.id)
            raise
        if seq is None:
            session.cache.release(node)
            return None
        note_commit(session, seq)
        if files:
            self._images.put(files)  # for later turns, whose requests may refer to them
            new = session.record_images(files)  # other choices of the reply may have recorded some of them
            self._metrics.images.by[()] += len(new)
            self._metrics.image_bytes.by[()] += sum([len(file.data) for file in new])
        return node

    def _committed(self, turn: Turn, node: Node) -> None:
        """Make a committed turn visible: as a parent for later turns, and to its readers."""
        session = turn.session
        if turn.recorded:
            turn.drop_columns()
        session.cache.publish(node)
        session.record_commit(turn.interaction)
        if turn.held:
            turn.release()
        turn.timeline.committed = time.monotonic()
        try:
            self._count(turn)
        except Exception:  # the turn is durable, so an error in a metric must not fail it
            logger.exception(
                "a turn could not be counted",
                {"interaction": turn.interaction.id, "session": turn.session.id, **turn.session.labels},
            )
        if self._unrecorded:  # the database takes turns again
            self._record_soon()

    def check_backlog(self) -> None:
        """Raise StoreUnavailable, and try again to record failed turns, if too many wait for the database."""
        if len(self._unrecorded) >= _MOST_UNRECORDED:
            self._record_soon()
            raise StoreUnavailable(f"{len(self._unrecorded)} failed turns wait for the database; try again")

    async def record_rest(self) -> None:
        """Record the failures that the database refused, before the server stops. Log how many it still refuses."""
        await self._record_late(waiting=False)
        if self._unrecorded:
            logger.warning("failed turns could not be recorded", {"turns": len(self._unrecorded)})

    def _record_soon(self) -> None:
        if time.monotonic() >= self._record_at and not self._recording:
            self._record_at = time.monotonic() + _RECORD_EVERY_S
            # At the maximum, failures are recorded without waiting for their retries.
            self._in_background(self._record_late(waiting=len(self._unrecorded) < _MOST_UNRECORDED))

    async def _record_late(self, *, waiting: bool) -> None:
        """Record the failures that the database refused, until it is unavailable again.

        With `waiting`, a failure is recorded only after another replica has had time to answer a retry. A failure that
        a retry has answered is marked as superseded and not recorded. A turn leaves the queue once it is recorded, or
        once there is nothing to record.
        """
        self._recording = True
        try:
            for _ in range(len(self._unrecorded)):
                try:
                    kept = await self._record(self._unrecorded[0], waiting=waiting)
                except StoreUnavailable:
                    if self._log.refused:
                        return
                    kept = True  # the database refuses only this turn; the others do not wait for it
                turn = self._unrecorded.popleft()
                if kept:
                    self._unrecorded.append(turn)
        finally:
            self._recording = False

    async def _record(self, turn: Turn, *, waiting: bool) -> bool:
        """Record a failure. Return True if it must still wait for its retry. Raises StoreUnavailable."""
        try:
            session = self._registry.find(turn.session.id) or turn.session
            await self._registry.refresh(session)
            if _answered_since(session, turn):
                await self._log.supersede(turn.interaction.id)
            elif waiting and time.time() < (turn.interaction.completed_at or 0.0) + _RETRIED_WITHIN_S:
                return True
            else:
                files = await self._files_of_failure(turn)
                await self._log.append(turn.interaction, None, files)
                turn.session.record_failure(turn.interaction.id)
                turn.session.record_images(files)
        except StoreUnavailable:
            raise
        except ProxyError:
            pass  # it was committed after all, or its session was deleted
        except Exception:
            logger.exception(
                "could not record the failed turn %(interaction)s",
                {"interaction": turn.interaction.id, "session": turn.session.id, **turn.session.labels},
            )
        return False

    async def _files(self, turn: Turn) -> Sequence[ImageFile]:
        """The images of a turn that its session may not have yet. Raises ProxyError for an image that is not found."""
        if not turn.interaction.images:
            return ()
        files, had = turn.request.files, turn.session.images
        new = {image.digest for image in turn.interaction.images} - had.keys()
        read = await self._images.get([digest for digest in new if digest not in files])
        return [*read, *(files[digest] for digest in new if digest in files)]

    async def _files_of_failure(self, turn: Turn) -> Sequence[ImageFile]:
        """The images as in `_files`. If one is not found, the failure is recorded without any images."""
        try:
            return await self._files(turn)
        except InvalidRequest:
            turn.interaction.images = ()
            return ()

    def _hold(self, turn: Turn) -> None:
        """Keep a failed turn until the database takes it. Its images are kept only while the pool has room for them."""
        if turn.request.files:
            self._images.put(turn.request.files.values())
            turn.request = replace(turn.request, files={})
        turn.generate.images = None
        self._unrecorded.append(turn)
        if len(self._unrecorded) == _MOST_UNRECORDED:
            logger.warning("failed turns wait for the database, so no new ones start", {"turns": _MOST_UNRECORDED})

    def _describe(self, turn: Turn, finish: FinishReason) -> None:
        interaction, parser = turn.interaction, turn.parser
        interaction.output = parser.message
        interaction.stop_string = parser.stop_string
        interaction.reasoning_tokens = parser.reasoning_tokens
        interaction.malformed_calls = parser.malformed_calls
        calls_end = finish is FinishReason.STOP and bool(interaction.output.tool_calls)
        interaction.finish_reason = FinishReason.TOOL_CALLS if calls_end else finish
        interaction.status = Status.COMPLETE
        interaction.completed_at = time.time()

    def _reason(self, turn: Turn) -> Reason:
        if turn.interaction.parent_id is not None and is_unaligned(turn.interaction):
            return Reason.DRIFT if turn.prompt.bridged else Reason.TEMPLATE
        return turn.session.cache.reason_for(turn.request, turn.prompt.identity, turn.prompt.match)

    async def record_failure(self, turn: Turn, status: Status, error: str) -> None:
        """Store a failed or aborted turn with the tokens that it sampled, unless its session was deleted."""
        interaction = turn.interaction
        if turn.committing:
            return
        turn.drop_columns()
        interaction.replay = {}
        if turn.session.deleted:
            self._log.note_deleted(interaction.id)
            return
        turn.attempt.stage = Stage.ENDING  # from now on, no retry attaches to it
        turn.committing = True  # can no longer be cancelled, so that the failure is recorded
        turn.timeline.failed = time.monotonic()
        interaction.status, interaction.error, interaction.completed_at = status, error, time.time()
        turn.prove()
        turn.parser.finish()
        interaction.output = turn.parser.message
        self._metrics.ended.by[turn.request.api, status] += 1
        try:
            files = await self._files_of_failure(turn)
            seq = await self._log.append(interaction, None, files)
        except ProxyError as problem:
            if isinstance(problem, SessionNotFound) and turn.session.confirmed:
                self._registry.forget_deleted(turn.session)
                self._log.note_deleted(interaction.id)
                return
            if isinstance(problem, StoreUnavailable):  # logged as an outage of the database; recorded after it
                self._hold(turn)
            else:
                logger.error(
                    "could not record the %(status)s turn %(interaction)s: %(reason)s",
                    {
                        "status": status,
                        "reason": problem.message,
                        "interaction": interaction.id,
                        "session": turn.session.id,
                        **turn.session.labels,
                    },
                )
            return
        turn.session.record_failure(interaction.id)
        turn.session.record_images(files)
        if seq is not None:
            note_commit(turn.session, seq)

    def _count(self, turn: Turn) -> None:
        interaction, metrics = turn.interaction, self._metrics
        metrics.ended.by[interaction.api, interaction.status] += 1
        metrics.interactions.by[(interaction.reason,)] += 1
        if interaction.route:
            metrics.routes.by[(interaction.route,)] += 1
        sampled = len(interaction.output_ids)
        metrics.tokens.by[("prompt",)] += interaction.prefix_length + len(interaction.prompt_suffix)
        metrics.tokens.by[("output",)] += sampled
        metrics.cached.by[()] += interaction.cached_tokens or 0
        metrics.malformed.by[()] += interaction.malformed_calls
        if interaction.parent_id is not None and is_unaligned(interaction):
            metrics.unaligned.by[()] += 1
            logger.warning(
                "interaction %(interaction)s is not aligned with its parent, so its tokens start a new sample: "
                "%(reason)s",
                {
                    "interaction": interaction.id,
                    "reason": interaction.reason,
                    "session": turn.session.id,
                    **turn.session.labels,
                },
            )
        timeline = turn.timeline
        begun, first, ended, seen = timeline.begun, timeline.first_token, timeline.sampled, list[Seen]()
        if begun is not None:
            seen.append((metrics.duration, (), time.monotonic() - begun))
            if first is not None:
                seen.append((metrics.first_token, (), first - begun))
        if first is not None and ended is not None and sampled > 1:
            seen.append((metrics.token_interval, (), (ended - first) / (sampled - 1)))
        for name, start, end in timeline.parts():
            seen.append((metrics.phases, (name,), end - start))
        observe_all(seen)


def _answered_since(session: LiveSession, turn: Turn) -> bool:
    """True if an equal request was answered after the turn failed."""
    failed_at = turn.interaction.completed_at or 0.0
    same = session.attempts.get(turn.attempt.key, ())
    return any(
        attempt.stage is Stage.COMPLETE and any((i.completed_at or 0.0) >= failed_at for i in attempt.interactions)
        for attempt in same
    )


def _lineage(turn: Turn) -> Lineage | None:
    """What the conversation that a turn begins came from."""
    interaction, cache = turn.interaction, turn.session.cache
    same = cache.same_messages(interaction.new_messages, turn.prompt.identity)
    return lineage_of(interaction, cache.newest(SEARCHED), cache.called, cache.turn, same)
