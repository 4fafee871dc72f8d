"""Faults of durability, and in the order of events, that show where processes end, pause and start again."""

from __future__ import annotations

from functools import partial

from tests.torture.plant import Plant

_Plant = partial(Plant, module="tests.torture.processes", seeds=30)

OF_PROCESSES = (
    _Plant(
        "a_reply_is_sent_before_its_turn_is_committed",
        "servers_that_end",
        "proxy/store/turn_log.py",
        "        seq: int | None = await self._write.submit(writes.append_interactions, change, size=size)\n",
        "        self._write.submit(writes.append_interactions, change, urgent=False, size=size)\n"
        "        seq: int | None = -1\n",
    ),
    _Plant(
        "the_turns_of_a_worker_that_died_are_counted_on",
        "workers_that_are_killed",
        "proxy/serving/supervisor.py",
        "        self._attempt_table.clear(number)\n",
        "",
    ),
    _Plant(
        "a_turn_that_is_given_up_in_a_pause_is_counted_on",
        "pauses_and_weights",
        "proxy/engine/gate.py",
        "            self._arrivals.discard(timer)\n            self._waiting -= 1\n",
        "            self._arrivals.discard(timer)\n        self._waiting -= 1\n",
    ),
    _Plant(
        "an_acknowledgement_is_answered_before_it_is_stored",
        "trainers_that_race",
        "proxy/store/claim_queue.py",
        "        result: AcknowledgeResult = await self._database.write.submit(claims.acknowledge, done)\n",
        "        self._database.write.submit(claims.acknowledge, done, urgent=False)\n"
        "        result = AcknowledgeResult(tuple(done.session_ids), {})\n",
    ),
    _Plant(
        "a_stop_does_not_wait_for_running_turns",
        "models_that_stop",
        "proxy/turns/running.py",
        "            await asyncio.wait(tasks, timeout=left_s)\n",
        "            break\n",
    ),
    _Plant(
        "the_session_of_an_interrupted_episode_ends_as_finished",
        "rollouts_that_are_interrupted",
        "tokengrove/rollout/episodes/play.py",
        "await to_the_end(leave_session(self._episode, CANCELLED, _RETRY_CANCELLED_S))",
        "await to_the_end(leave_session(self._episode, None, _RETRY_CANCELLED_S))",
    ),
    _Plant(
        "what_a_killed_run_left_stays_in_its_groups",
        "rollouts_that_are_interrupted",
        "tokengrove/runs/leftovers.py",
        '            await withdraw(client, session["session_id"])\n',
        "            pass\n",
    ),
    _Plant(
        "an_episode_that_ended_as_its_run_was_killed_is_not_written_down",
        "rollouts_that_are_interrupted",
        "tokengrove/runs/episodes_run.py",
        "            await self._folder.journal.append(entry)\n",
        "",
    ),
)
