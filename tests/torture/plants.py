"""Faults in the order of events, planted one at a time: each must be found by a scenario within 200 seeds, or 30 of
the second tier.

`python -m tests.torture.plants [NAME ...]` changes a copy of the code, runs a scenario there, and says which seed found
the fault. A scenario is written for what must hold; a plant only names the one in which its code runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.torture.plant import Plant
from tests.torture.process_plants import OF_PROCESSES

ROOT = Path(__file__).parents[2]
_SHOWN = 300


PLANTS = (
    Plant(
        "turns_are_not_looked_for_on_other_workers_after_rendering",
        "turns_on_workers",
        "proxy/turns/turns.py",
        "            return earlier\n        self.earlier.check_elsewhere(session, key)\n",
        "            return earlier\n",
    ),
    Plant(
        "turns_in_flight_are_not_counted_again_after_rendering",
        "turns_and_disconnects",
        "proxy/turns/turns.py",
        "        self.running.check_room(request)\n        plan",
        "        plan",
    ),
    Plant(
        "a_choice_that_is_cancelled_as_it_gets_its_place_keeps_it",
        "places_of_choices",
        "proxy/resources/places.py",
        "                self.give_back(sender)\n            else",
        "                pass\n            else",
    ),
    Plant(
        "a_choice_keeps_its_place_while_it_waits_for_the_others_of_its_reply",
        "turns_of_a_crowd",
        "proxy/turns/commits.py",
        "            self._places.give_back(turn.request.sender)  # the choices that it waits for may need it\n"
        "            turn.placed = False\n"
        "            await turn.order.pass_through(turn.index)\n"
        "            await self._places.take(turn.request.sender)\n"
        "            turn.placed = True\n",
        "            await turn.order.pass_through(turn.index)\n",
    ),
    Plant(
        "the_writers_wake_up_is_cleared_after_the_queue_is_read",
        "writer_commits",
        "proxy/store/writer.py",
        "                self._rung = False  # before the queue is read: a change that comes later rings again\n"
        "                if self._company and len(self._queue) < _GATHER_CHANGES and not self._closing:\n"
        "                    time.sleep(_GATHER_S)\n"
        "                full = self._take()\n",
        "                if self._company and len(self._queue) < _GATHER_CHANGES and not self._closing:\n"
        "                    time.sleep(_GATHER_S)\n"
        "                full = self._take()\n"
        "                self._rung = False\n",
    ),
    Plant(
        "a_cancelled_waiter_of_the_pool_keeps_its_thread",
        "pool_of_threads",
        "proxy/resources/fair_pool.py",
        "            if work.place.done() and not work.place.cancelled():\n"
        "                self._end(work)\n            else:\n    ",
        "",
    ),
    Plant(
        "the_health_of_a_server_is_looked_at_during_a_weight_change",
        "pool_of_servers",
        "proxy/engine/servers/pool.py",
        "        if state is not self._state or self._changes or not member.alive:",
        "        if not member.alive:",
    ),
    Plant(
        "a_joining_server_does_not_wait_for_the_end_of_a_change",
        "pool_of_servers",
        "proxy/engine/servers/pool.py",
        "            settled = state is self._state and not self._changes and revision",
        "            settled = state is self._state and revision",
    ),
    Plant(
        "the_recording_of_an_ended_episode_is_cancelled_half_way",
        "recording_of_episodes",
        "tokengrove/rollout/scheduler.py",
        "await to_the_end(on_attempt(result, again))",
        "await on_attempt(result, again)",
    ),
    Plant(
        "older_news_of_the_leader_are_adopted_after_newer",
        "leader_news",
        "proxy/workers/leader.py",
        "        if self.last is None or told.number > self.last.number:\n            self.last = told\n",
        "        self.last = told\n",
    ),
    Plant(
        "a_pause_that_is_about_to_end_is_told",
        "leader_news",
        "proxy/workers/leader.py",
        "        self._state.ending = True\n",
        "",
    ),
    Plant(
        "nobody_is_woken_when_a_group_is_filtered",
        "roll_queue",
        "tokengrove/roll/scheduler/group_queue_manager.py",
        "            if queue.group_filter_count > filtered:\n                self._episodes[group_id].notify_all()\n",
        "",
    ),
    Plant(
        "a_claim_acknowledges_what_another_holds",
        "claims_of_trainers",
        "proxy/store/sql/claims.py",
        "        return bool(row.claimed_by == claim_id)\n",
        "        return True\n",
    ),
    Plant(
        "a_group_of_which_a_session_has_not_ended_is_leased",
        "replicas_of_trainers",
        "proxy/store/sql/claims.py",
        "where(same, or_(other.c.ended_order.is_(None), held))",
        "where(same, held)",
    ),
    Plant(
        "a_key_is_remembered_although_it_was_replaced_meanwhile",
        "keys_are_replaced",
        "proxy/sessions/keys.py",
        "        if not holder.control and released == self._released:",
        "        if not holder.control:",
    ),
    Plant(
        "nobody_is_woken_when_a_session_is_deleted",
        "sessions_end_and_are_deleted",
        "proxy/sessions/registry.py",
        "        session.ended.set()  # nobody waits for the end of a deleted session\n",
        "",
    ),
    Plant(
        "turns_begin_while_an_end_is_committed",
        "sessions_end_and_are_deleted",
        "proxy/sessions/endings.py",
        "        session.ending = True\n        try:\n            done",
        "        try:\n            done",
    ),
    Plant(
        "a_commit_in_doubt_is_repeated",
        "database_away",
        "proxy/store/writer.py",
        "                doubt = self._in_doubt or doubt\n",
        "",
    ),
    Plant(
        "a_turn_whose_commit_was_done_unnoticed_is_superseded",
        "database_away",
        "proxy/store/sql/writes.py",
        "        elif row.status != Status.COMPLETE.value:\n",
        "        else:\n",
    ),
    Plant(
        "turns_at_other_servers_do_not_keep_a_session",
        "replicas_expire_sessions",
        "proxy/store/sql/reads.py",
        "where(or_(intents.c.begun_at >= before, LIVES))",
        "where(intents.c.begun_at >= before)",
    ),
    Plant(
        "the_timeout_for_a_token_runs_during_a_pause",
        "gate_pauses_as_timeouts_end",
        "proxy/engine/gate.py",
        "        if self.state.paused is not None:\n            return\n        loop, limit_s",
        "        loop, limit_s",
    ),
    Plant(
        "a_turn_that_was_given_up_once_counts_as_cancelled",
        "gate_pauses",
        "proxy/engine/gate.py",
        "        flight.task.uncancel()\n        flight.expired",
        "        flight.expired",
    ),
    Plant(
        "the_wait_for_a_token_goes_on_after_a_pause_where_it_was",
        "gate_pauses",
        "proxy/engine/gate.py",
        "                flight.last_token_at = now\n        self._look()\n",
        "                pass\n        self._look()\n",
    ),
    Plant(
        "a_cancellation_is_taken_for_a_timeout_for_a_token",
        "gate_timeouts_and_cancellations",
        "proxy/engine/gate.py",
        "            and flight.task.cancelling() == flight.cancels + 1  # nobody else has cancelled it\n",
        "",
    ),
    Plant(
        "a_pause_that_is_cancelled_as_it_begins_holds_requests",
        "gate_pauses_that_are_given_up",
        "proxy/engine/gate.py",
        "            await self.let_in()\n            raise\n        self.state.enter(mode)",
        "            raise\n        self.state.enter(mode)",
    ),
    Plant(
        "requests_are_let_in_before_the_engine_runs_again",
        "pool_of_servers",
        "proxy/engine/admin.py",
        "            await self._engine.resume()\n            await self._gate.let_in()\n            paused_s",
        "            await self._gate.let_in()\n            await self._engine.resume()\n            paused_s",
    ),
    Plant(
        "a_server_joins_in_a_state_that_has_changed_meanwhile",
        "pool_of_servers",
        "proxy/engine/servers/pool.py",
        "            settled = state is self._state and not self._changes and revision",
        "            settled = not self._changes and revision",
    ),
    Plant(
        "a_server_counts_as_paused_only_once_it_has_answered",
        "pool_of_servers",
        "proxy/engine/servers/pool.py",
        "            for member in self._alive():\n"
        "                member.paused = True\n"
        "            await self._on_all(lambda engine: engine.pause(mode))\n",
        "            await self._on_all(lambda engine: engine.pause(mode))\n"
        "            for member in self._alive():\n"
        "                member.paused = True\n",
    ),
    Plant(
        "a_server_that_returns_within_a_weight_transfer_gets_the_rest",
        "weights_of_servers",
        "proxy/engine/servers/transfer.py",
        "        late = [member for member in alive if member not in self._having]\n",
        "        late: list[Member] = []\n",
    ),
    Plant(
        "a_server_that_is_removed_as_it_joins_stays_paused",
        "weights_of_servers",
        "proxy/engine/servers/pool.py",
        "        self.pauses.leave(engine.url)\n"
        "        paused = member.paused\n"
        "        await self._part(member)\n"
        "        if paused and not member.paused:  # else it may be paused from an earlier time\n"
        "            await self.pauses.continued(engine.url)\n",
        "        await engine.close()\n",
    ),
    Plant(
        "nobody_is_told_of_a_group_that_is_complete",
        "roll_queue",
        "tokengrove/roll/scheduler/group_queue_manager.py",
        "            if queue.first() is not None:\n                self._deliverable.notify_all()\n",
        "",
    ),
    Plant(
        "nobody_is_woken_when_an_environment_gives_its_place_back",
        "roll_queue",
        "tokengrove/roll/scheduler/group_queue_manager.py",
        "            self.group_queue[group_id].give_back(episode_id)\n"
        "            self._episodes[group_id].notify_all()\n",
        "            self.group_queue[group_id].give_back(episode_id)\n",
    ),
    Plant(
        "nobody_is_told_that_the_last_environment_has_left",
        "roll_queue_until_the_data_end",
        "tokengrove/roll/scheduler/group_queue_manager.py",
        "env_id is None else env_id)\n            self._deliverable.notify_all()\n",
        "env_id is None else env_id)\n",
    ),
    Plant(
        "nobody_is_told_that_an_environment_cannot_play",
        "roll_queue_until_the_data_end",
        "tokengrove/roll/scheduler/group_queue_manager.py",
        "            self._failure = self._failure or error\n            self._deliverable.notify_all()\n",
        "            self._failure = self._failure or error\n",
    ),
    Plant(
        "the_end_of_a_session_is_cancelled_with_its_episode",
        "recording_of_episodes",
        "tokengrove/rollout/episodes/play.py",
        "failure = await to_the_end(leave_session(self._episode, failure, None))",
        "failure = await leave_session(self._episode, failure, None)",
    ),
    Plant(
        "the_end_of_a_cancelled_session_is_cancelled_again",
        "recording_of_episodes",
        "tokengrove/rollout/episodes/play.py",
        "await to_the_end(leave_session(self._episode, CANCELLED, _RETRY_CANCELLED_S))",
        "await leave_session(self._episode, CANCELLED, _RETRY_CANCELLED_S)",
    ),
    Plant(
        "the_grace_of_an_attempt_runs_on_after_a_retry_has_joined_it",
        "turns_on_workers",
        "proxy/sessions/attempts.py",
        "        self.readers += 1\n        self.stop_grace()",
        "        self.readers += 1",
    ),
    Plant(
        "what_a_request_repeats_is_not_decided_again_after_rendering",
        "turns_on_workers",
        "proxy/turns/turns.py",
        "        decision = decide(session.attempts.get(key, ()), request)\n"
        "        if (earlier := await self.earlier.answering(session, request, decision)) is not None:\n"
        "            return earlier\n",
        "        decision = NewSample(())\n",
    ),
    Plant(
        "a_turn_is_cancelled_while_it_is_committed",
        "turns_and_disconnects",
        "proxy/turns/commits.py",
        "        turn.committing = True  # no longer cancelled: the commit may already be durable\n",
        "",
    ),
    Plant(
        "a_forgotten_session_that_somebody_holds_is_loaded_again",
        "sessions_end_and_are_deleted",
        "proxy/sessions/registry.py",
        "        self._forgotten[session.id] = weakref.ref(session)\n",
        "",
    ),
    Plant(
        "the_answers_of_repeatable_calls_are_stored_after_the_calls_were_done",
        "claims_and_restarts",
        "proxy/store/open_database.py",
        "        return self.write.submit(answered, Answered(write, payload, noted))\n",
        "        done = self.write.submit(write, payload, urgent=urgent)\n"
        "        done.add_done_callback(\n"
        "            lambda _: done.cancelled() or done.exception() or done.result() is False or self.write._closing\n"
        "            or self.write.submit(answered, Answered(lambda *_: [done.result()], None, noted))\n"
        "        )\n"
        "        return done\n",
    ),
    Plant(
        "the_key_of_a_session_is_known_before_its_row",
        "keys_move_to_new_sessions",
        "proxy/sessions/session_starter.py",
        "        max_live, max_taken = self._limits.max_live, self._limits.max_taken\n",
        "        self._keys.add(record)\n        max_live, max_taken = self._limits.max_live, self._limits.max_taken\n",
    ),
    Plant(
        "a_turn_that_begins_as_its_session_is_read_does_not_keep_it",
        "sessions_expire",
        "proxy/sessions/endings.py",
        "        await self._registry.refresh(session)\n"
        "        while session.record.status is SessionStatus.ACTIVE:\n"
        "            if in_use():\n"
        "                return False\n",
        "        if in_use():\n"
        "            return False\n"
        "        await self._registry.refresh(session)\n"
        "        while session.record.status is SessionStatus.ACTIVE:\n",
    ),
    Plant(
        "what_was_committed_as_a_connection_was_lost_is_committed_again_at_once",
        "database_away_from_trainers",
        "proxy/store/writer.py",
        "                lost = kept and outcomes is None and gone\n",
        "                lost = kept and gone\n",
    ),
    Plant(
        "a_session_is_not_read_again_while_a_turn_of_it_runs",
        "replicas_of_turns",
        "proxy/sessions/registry.py",
        "            if not self.shared:\n                return session\n",
        "            if session.running or not self.shared:\n                return session\n",
    ),
    Plant(
        "who_comes_while_a_session_is_read_shares_what_is_read",
        "replicas_of_turns",
        "proxy/sessions/registry.py",
        "        news = await self._news.load_news(session.id, session.seen)\n        if confirmed",
        "        reads = self.__dict__.setdefault('_reads', {})\n"
        "        if (key := (session.id, session.seen)) not in reads:\n"
        "            reads[key] = asyncio.create_task(self._news.load_news(*key))\n"
        "            reads[key].add_done_callback(lambda _: reads.pop(key))\n"
        "        news = await asyncio.shield(reads[key])\n"
        "        if confirmed",
    ),
    Plant(
        "live_sessions_are_counted_before_the_transaction_that_starts_another",
        "replicas_of_starts",
        "proxy/sessions/session_starter.py",
        "        await self._starts.create_session(\n"
        "            record, chosen_key=chosen_key, max_live=max_live, max_taken=max_taken, noted=noted\n"
        "        )\n",
        "        if max_live is not None and await self._starts.count_live() >= max_live:\n"
        "            from proxy.store.refusals import too_many_live\n"
        "            raise too_many_live(max_live)\n"
        "        await self._starts.create_session(record, chosen_key=chosen_key, max_taken=max_taken, noted=noted)\n",
    ),
    Plant(
        "gates_that_a_leader_held_before_it_told_anything_stay_shut",
        "leader_restarts",
        "proxy/workers/leader.py",
        '        if last is not None or any(await self._peers.ask_all("held")):',
        "        if last is not None:",
    ),
    Plant(
        "a_pause_that_ends_with_its_operation_is_told",
        "leader_restarts",
        "proxy/workers/leader.py",
        "        told = self._follower.last = LeaderState(number, self._state.lasting, self._engine.common())\n",
        "        told = self._follower.last = LeaderState(number, self._state.shared, self._engine.common())\n",
    ),
    Plant(
        "who_updates_weights_looks_for_a_pause_before_it_is_his_turn",
        "turns_and_pauses",
        "proxy/engine/admin.py",
        "        async with self._lock:\n            if self._state.paused is not None:\n                return await",
        "        was_paused = self._state.paused is not None\n"
        "        async with self._lock:\n            if was_paused:\n                return await",
    ),
    Plant(
        "a_stop_does_not_wait_for_the_turns_that_it_has_cancelled",
        "turns_and_restarts",
        "proxy/turns/running.py",
        "        await asyncio.gather(*self._tasks(), return_exceptions=True)\n",
        "",
    ),
    Plant(
        "who_would_wait_once_the_server_stops_waits",
        "gate_shuts_down",
        "proxy/engine/gate.py",
        "asyncio.timeout(0 if self._stopping else limit_s)",
        "asyncio.timeout(limit_s)",
    ),
    Plant(
        "no_timeout_runs_while_a_pause_waits_for_requests",
        "gate_drains_with_a_hung_turn",
        "proxy/engine/gate.py",
        "        self.state.close(mode)\n        try:",
        "        self.state.close(mode)\n"
        "        if self._alarm is not None:\n"
        "            self._alarm.cancel()\n"
        "            self._alarm = None\n"
        "        try:",
    ),
)

ALL = (*PLANTS, *OF_PROCESSES)


def main() -> int:
    """Plant each fault; return 1 if one was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture.plants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *(plant.name for plant in ALL)])
    names = parser.parse_args().names
    return int(not all([_found(plant) for plant in ALL if not names or plant.name in names]))


def _found(plant: Plant) -> bool:
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        for name in ("proxy", "tokengrove", "migrations", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        planted = copy / plant.path
        text = planted.read_text()
        if text.count(plant.old) != 1:
            raise SystemExit(f"{plant.name}: its place in {plant.path} is not there, or there twice")
        planted.write_text(text.replace(plant.old, plant.new))
        command = [sys.executable, "-m", plant.module, "--seeds", str(plant.seeds), "--scenario", plant.scenario]
        done = subprocess.run(
            command, cwd=copy, env={**os.environ, "PYTHONPATH": folder}, capture_output=True, text=True, check=False
        )
    seed = re.search(r"^FAILED: scenario \w+, seed (\d+)", done.stdout, re.M)
    why = re.search(r"^(?:\w+\.)*\w*(?:Error|Hung|Timeout|Unavailable)\b.*", done.stdout, re.M)
    told = f"found by seed {seed[1]}: {why[0][:_SHOWN] if why else done.stdout}" if seed else "NOT FOUND"
    print(f"{plant.name}: {told}", flush=True)
    if not seed and done.returncode:
        print(done.stderr[-2000:])
    return seed is not None


if __name__ == "__main__":
    sys.exit(main())
