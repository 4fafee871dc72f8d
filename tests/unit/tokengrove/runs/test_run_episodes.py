"""Whole runs against a server: groups and exports, and how a run is resumed whatever became of its earlier start."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support import real_server
from tokengrove.client import Client
from tokengrove.client.options import ListingFilter
from tokengrove.errors import ConfigurationError, EngineUnavailable
from tokengrove.rollout import scheduler
from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult, Task
from tokengrove.rollout.executors import ExecutorOptions, executor_for
from tokengrove.runs import Observer, Played, RunOptions, Summary, run_episodes, samples
from tokengrove.runs.run_folder import RunFolder

AGENTS = "tests.unit.tokengrove.runs.run_agents"
ROWS = [{"question": "one"}, {"question": "two"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_server(tmp_path_factory.mktemp("server"), engine_arg=("tokens=4",)) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return str(path)


def options(tmp_path: Path, data: str, url: str, **more: Any) -> RunOptions:
    given = {"agent": f"{AGENTS}:asks", "group_size": 2, "folder": str(tmp_path / "runs"), "retries": 0}
    return RunOptions(data=data, url=url, **{**given, **more})


def sessions(client: Client, played: Played, *, withdrawn: bool = False) -> list[dict[str, Any]]:
    mine: ListingFilter = {"metadata": {"tokengrove_run": played.run_id}, "validation": "include"}
    return client.sessions({**mine, "withdrawn": withdrawn})


def exported(played: Played) -> list[str]:
    assert played.summary.output is not None
    return [json.loads(line)["session_id"] for line in Path(played.summary.output).read_text().splitlines()]


def kept_runs(tmp_path: Path) -> list[str]:
    return [folder.name for folder in (tmp_path / "runs").glob("*")]


def outcomes(listed: list[dict[str, Any]]) -> Counter[str | None]:
    return Counter(session["outcome"] for session in listed)


class Stopper(Observer):
    """Stops the run, from inside, when so many episodes have ended."""

    def __init__(self, after: int) -> None:
        self.after, self.stop = after, None
        self.done = self.finished_here = 0

    def on_start(self, stop: Any) -> None:
        self.stop = stop

    def planned(self, episodes: int, done: int, summary: Summary) -> None:
        self.done = done

    def finished(self, result: EpisodeResult) -> None:
        self.finished_here += 1
        if self.finished_here == self.after and self.stop is not None:
            self.stop("enough")


async def interrupted(chosen: RunOptions, after: int) -> Played:
    stopper = Stopper(after)
    return await run_episodes(chosen, observer=stopper, on_start=stopper.on_start)


async def test_the_samples_are_those_of_the_runs_own_sessions_in_groups_that_can_be_claimed(
    tmp_path: Path, data: str, url: str, client: Client
) -> None:
    with client.session("somebody-else"):
        pass
    played = await run_episodes(options(tmp_path, data, url))
    listed = sessions(client, played)
    assert outcomes(listed) == {"Finished": 4}
    assert sorted(exported(played)) == sorted(played.session_ids) == sorted(each["session_id"] for each in listed)
    groups = Counter(each["group_id"] for each in listed)
    assert list(groups.values()) == [2, 2] and {each["group_size"] for each in listed} == {2}
    for group in groups:
        assert len(client.claim(filter={"group_id": group}, limit=9).sessions) == 2


async def test_a_run_that_is_stopped_once_all_was_played_ends_as_if_it_were_not(
    tmp_path: Path, data: str, url: str
) -> None:
    played = await interrupted(options(tmp_path, data, url), 4)
    assert played.summary.succeeded and played.summary.stopped is None
    assert sorted(exported(played)) == sorted(played.session_ids) and len(played.session_ids) == 4


async def test_two_runs_of_the_same_tasks_have_no_group_in_common(
    tmp_path: Path, data: str, url: str, client: Client
) -> None:
    first = await run_episodes(options(tmp_path, data, url))
    second = await run_episodes(options(tmp_path, data, url))
    assert first.folder != second.folder  # a run that is complete is not resumed
    groups = [{each["group_id"] for each in sessions(client, played)} for played in (first, second)]
    assert not groups[0] & groups[1]


async def test_a_trainer_plays_its_own_tasks_without_anything_on_the_disk(
    tmp_path: Path, url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = RunOptions(agent=f"{AGENTS}:asks", url=url, group_size=2, folder=None)
    played = await run_episodes(chosen, [{"question": "a", "reward": 0.25}, {"question": "b", "reward": 0.75}])
    assert [result.reward for result in played.results] == [0.25, 0.25, 0.75, 0.75]
    assert played.summary.mean_reward == 0.5
    assert len(client.export(session_ids=played.session_ids, advantages="grpo").samples) == 4
    assert (played.folder, os.listdir(tmp_path)) == (None, [])


async def test_an_executor_in_use_is_not_closed(tmp_path: Path, url: str) -> None:
    chosen = RunOptions(agent=f"{AGENTS}:asks", url=url, folder=None)
    async with executor_for(ExecutorOptions(concurrency=2)) as executor:
        for _ in range(2):
            played = await run_episodes(chosen, ROWS, executor=executor)
            assert played.summary.succeeded


async def test_sessions_for_validation_are_neither_claimed_nor_exported(
    tmp_path: Path, data: str, url: str, client: Client
) -> None:
    played = await run_episodes(options(tmp_path, data, url, validation=True))
    assert played.summary.succeeded and played.summary.output is None
    assert played.folder is not None and not list(played.folder.glob("samples*"))
    for group in {each["group_id"] for each in sessions(client, played)}:
        assert client.claim(filter={"group_id": group}, limit=9).sessions == {}
        assert client.export(filter={"group_id": group}).samples == []


async def test_an_export_that_is_asked_for_has_sessions_for_validation(tmp_path: Path, data: str, url: str) -> None:
    target = tmp_path / "measured.npz"
    played = await run_episodes(options(tmp_path, data, url, validation=True, output=str(target)))
    assert played.summary.output == str(target) and target.exists()
    assert played.summary.export is not None and played.summary.export["sessions"] == 4


@pytest.mark.parametrize(("export_failed", "count"), [(False, 2), (True, 4)])
async def test_failed_episodes_are_exported_only_if_asked_for(
    tmp_path: Path, data: str, url: str, client: Client, export_failed: bool, count: int
) -> None:
    chosen = options(tmp_path, data, url, agent=f"{AGENTS}:fails_on_two", export_failed=export_failed)
    played = await run_episodes(chosen)
    assert played.summary.failures == {"agent": 2} and not played.summary.succeeded
    assert outcomes(sessions(client, played)) == {"Finished": 2, "Failed": 2}
    assert len(set(exported(played))) == count


@pytest.mark.parametrize(("export_failed", "count"), [(False, 2), (True, 4)])
async def test_more_sessions_than_an_export_can_name_are_chosen_as_the_others_are(
    tmp_path: Path,
    data: str,
    url: str,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    export_failed: bool,
    count: int,
) -> None:
    monkeypatch.setattr(samples, "_MOST_NAMED", 1)
    await run_episodes(options(tmp_path, data, url))
    chosen = options(tmp_path, data, url, agent=f"{AGENTS}:fails_on_two", export_failed=export_failed)
    played = await run_episodes(chosen)
    own = {each["session_id"] for each in sessions(client, played)}
    assert len(set(exported(played))) == count and set(exported(played)) <= own


async def test_a_filter_of_metadata_selects_among_the_many_sessions_of_the_run_and_no_others(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "_MOST_NAMED", 1)
    rows = [Task(name, {"question": name}, {"metadata": {"half": name}}) for name in ("a", "b")]
    chosen = options(tmp_path, "", url, export={"filter": {"metadata": {"half": "a"}}})
    await run_episodes(chosen, rows)
    played = await run_episodes(chosen, rows)
    assert sorted(exported(played)) == sorted(each.session_id for each in played.results if each.task_id == "a")


async def test_an_earlier_export_in_a_folder_is_replaced_and_not_added_to(tmp_path: Path, data: str, url: str) -> None:
    chosen = options(tmp_path, data, url, name="n", output=str(tmp_path / "pages"))
    await run_episodes(chosen)
    before = sorted(path.name for path in (tmp_path / "pages").iterdir())
    stale = tmp_path / "pages" / "page-000099.jsonl"
    stale.write_text("{}")
    await run_episodes(chosen)
    assert sorted(path.name for path in (tmp_path / "pages").iterdir()) == before


async def test_a_run_that_an_executor_left_incomplete_exports_nothing(tmp_path: Path, data: str, url: str) -> None:
    class Closing:
        """Plays the first samples; it is closed before the second ones."""

        async def play(self, plan: EpisodePlan) -> EpisodeResult:
            failure: Any = "cancelled" if plan.sample else None
            return EpisodeResult(plan.task.task_id, plan.sample, 0, plan.session_id, failure=failure)

        async def close(self) -> None:
            """Nothing to close."""

    played = await run_episodes(options(tmp_path, data, url), executor=Closing())
    assert (played.summary.done, played.summary.complete, played.summary.output) == (2, False, None)


async def test_a_run_whose_samples_could_not_be_written_writes_them_when_it_is_started_again(
    tmp_path: Path, data: str, url: str
) -> None:
    chosen = options(tmp_path, data, url)
    with (
        mock.patch.object(samples.Samples, "write", side_effect=EngineUnavailable("gone")),
        pytest.raises(EngineUnavailable),
    ):
        await run_episodes(chosen)
    second = await run_episodes(chosen)
    assert second.summary.earlier == 4 and sorted(exported(second)) == sorted(second.session_ids)
    third = await run_episodes(chosen)
    assert third.summary.earlier == 0 and third.folder != second.folder


async def test_a_failed_attempt_leaves_its_group_so_that_no_claim_has_it(
    tmp_path: Path, url: str, client: Client
) -> None:
    """While the retry waits, the group has too few sessions; afterwards it has exactly its size."""
    flag = tmp_path / "flag"
    claimed = []

    class Watching(Observer):
        def retried(self, result: EpisodeResult) -> None:
            claimed.append(dict(client.claim(limit=9, filter={"task_id": "t"}).sessions))
            flag.touch()

    rows = [{"task_id": "t", "question": "q", "file": str(flag)}]
    chosen = RunOptions(
        agent=f"{AGENTS}:fails_without_file", url=url, folder=None, group_size=1, retries=1, retry_on=("agent",)
    )
    played = await run_episodes(chosen, rows, observer=Watching())
    assert claimed == [{}]
    assert (played.summary.done, played.summary.retries) == (1, {"agent": 1})
    assert outcomes(sessions(client, played)) == {"Finished": 1}
    (failed,) = sessions(client, played, withdrawn=True)
    assert failed["outcome"] == "Failed" and "the file is missing" in failed["exit_reason"]
    assert list(client.claim(limit=9, filter={"task_id": "t"}).sessions) == played.session_ids


async def test_a_run_that_was_stopped_goes_on_with_the_same_options(
    tmp_path: Path, data: str, url: str, client: Client
) -> None:
    chosen = options(tmp_path, data, url, concurrency=1)
    first = await interrupted(chosen, after=1)
    assert (first.summary.done, first.summary.stopped, first.summary.output) == (1, "enough", None)
    assert outcomes(sessions(client, first)) == {"Finished": 1}  # what was cancelled has left its group
    second = await run_episodes(chosen)
    assert (second.run_id, second.folder) == (first.run_id, first.folder)
    assert (second.summary.done, second.summary.earlier) == (4, 1)
    assert first.session_ids[0] in second.session_ids
    groups = Counter(each["group_id"] for each in sessions(client, second))
    assert list(groups.values()) == [2, 2]
    assert sorted(exported(second)) == sorted(second.session_ids)


async def test_a_run_that_is_cancelled_can_be_resumed(tmp_path: Path, data: str, url: str, client: Client) -> None:
    chosen, begun = options(tmp_path, data, url, concurrency=1), asyncio.Event()

    class Watching(Observer):
        def finished(self, result: EpisodeResult) -> None:
            begun.set()

    playing = asyncio.create_task(run_episodes(chosen, observer=Watching()))
    await begun.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    played = await run_episodes(chosen)
    assert played.summary.complete and played.summary.earlier >= 1
    assert outcomes(sessions(client, played)) == {"Finished": 4}


async def test_what_a_killed_run_left_is_counted_if_it_ended_and_withdrawn_if_it_is_live(
    tmp_path: Path, data: str, url: str, client: Client
) -> None:
    chosen = options(tmp_path, data, url, concurrency=1, agent_arg={})
    first = await interrupted(chosen, after=1)
    assert first.folder is not None
    (first.folder / "journal.jsonl").write_text("")  # killed before the line, after the session's end
    mark = {"tokengrove_run": first.run_id, "tokengrove_episode": [0, first.results[0].task_id, 1, 0]}
    live = client.start_session("x", metadata=mark)
    second = await run_episodes(chosen)
    assert (second.summary.done, second.summary.earlier) == (4, 1)
    assert first.session_ids[0] in second.session_ids
    assert second.results[0] == EpisodeResult(
        **{**first.results[0].as_json(), "seconds": pytest.approx(second.results[0].seconds)}
    )
    assert live.session_id not in {each["session_id"] for each in sessions(client, second)}
    third = await run_episodes(options(tmp_path, data, url, name=second.folder.name if second.folder else ""))
    assert third.summary.earlier == 4  # the line was written afterwards


async def test_failed_episodes_are_played_again_on_resume_only_if_asked_for(
    tmp_path: Path, url: str, client: Client
) -> None:
    flag = tmp_path / "flag"
    rows = [{"task_id": "f", "question": "q", "file": str(flag)}]
    chosen = {"agent": f"{AGENTS}:fails_without_file", "url": url, "folder": str(tmp_path / "runs"), "name": "n"}
    first = await run_episodes(RunOptions(**{**chosen, "retries": 0, "validation": True}), rows)
    assert first.summary.failures == {"agent": 1}
    flag.touch()
    same = await run_episodes(RunOptions(**{**chosen, "validation": True}), rows)
    assert (same.summary.failed, same.summary.earlier) == (1, 1)
    again = await run_episodes(RunOptions(**{**chosen, "validation": True, "retry_failed": True}), rows)
    assert (again.summary.failed, again.summary.done) == (0, 1)
    assert outcomes(sessions(client, again)) == {"Finished": 1}
    last = await run_episodes(RunOptions(**{**chosen, "validation": True}), rows)
    assert (last.summary.failed, last.summary.done, last.summary.earlier) == (0, 1, 1)


async def test_a_samples_file_of_this_run_is_replaced_and_any_other_is_refused_before_anything_is_played(
    tmp_path: Path, data: str, url: str
) -> None:
    target = tmp_path / "out.jsonl"
    chosen = options(tmp_path, data, url, name="n", output=str(target))
    await run_episodes(chosen)
    before = target.read_text()
    target.write_text("")
    again = await run_episodes(chosen)
    assert sorted(target.read_text().splitlines()) == sorted(before.splitlines()) and again.summary.earlier == 4
    with pytest.raises(ConfigurationError, match="exists already; give another name"):
        await run_episodes(options(tmp_path, data, url, name="other", output=str(target)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"group_size": 3}, "--group-size was 2 and is now 3"),
        ({"agent": f"{AGENTS}:fails_on_two"}, "--agent was"),
        ({"sampling": {"temperature": 0.5}}, '--sampling was not given and is now {"temperature":0.5}'),
        ({"limit": 1}, "it had 2 tasks, now there are 1"),
        ({"validation": True}, "--validation was false and is now true"),
    ],
)
async def test_another_run_under_the_same_name_is_refused_with_the_difference(
    tmp_path: Path, data: str, url: str, change: dict[str, Any], told: str
) -> None:
    await run_episodes(options(tmp_path, data, url, name="n"))
    with pytest.raises(ConfigurationError) as raised:
        await run_episodes(options(tmp_path, data, url, name="n", **change))
    assert told in str(raised.value)


async def test_variables_of_a_command_are_compared_but_written_nowhere(tmp_path: Path) -> None:
    def opened(value: str) -> RunFolder:
        given = RunOptions(command=("true",), agent_arg={"env": {"A_KEY": value}}, name="n", folder=str(tmp_path))
        return RunFolder.open(given, [Task("t", {})])

    opened("secret-1").close()
    folder = opened("secret-1")
    folder.write_summary({})
    text = "".join(file.read_text() for file in folder.path.iterdir())
    folder.close()
    with pytest.raises(ConfigurationError, match="--agent-arg was") as raised:
        opened("secret-2")
    assert "A_KEY" in text and "secret" not in text + str(raised.value)


async def test_how_a_run_is_played_may_change_when_it_is_resumed(tmp_path: Path, data: str, url: str) -> None:
    await interrupted(options(tmp_path, data, url, name="n", concurrency=1), after=1)
    changed = options(tmp_path, data, url, name="n", concurrency=3, retries=5, timeout_s=60.0, max_failures=1)
    assert (await run_episodes(changed)).summary.succeeded


async def test_other_data_under_the_same_name_is_refused(tmp_path: Path, data: str, url: str) -> None:
    await run_episodes(options(tmp_path, data, url, name="n"))
    with pytest.raises(ConfigurationError, match="the tasks of --data are others"):
        await run_episodes(options(tmp_path, f"{AGENTS}:OTHER_TASKS", url, name="n"))


async def test_a_run_is_not_resumed_with_a_server_that_has_none_of_its_sessions(
    tmp_path: Path, data: str, url: str, client: Client
) -> None:
    first = await interrupted(options(tmp_path, data, url, concurrency=1), after=1)
    for each in sessions(client, first):
        client.delete_session(each["session_id"])
    with pytest.raises(ConfigurationError, match="has none of the sessions of this run"):
        await run_episodes(options(tmp_path, data, url))


async def test_sessions_that_could_not_be_withdrawn_are_withdrawn_at_the_end(
    tmp_path: Path, url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead worker's session that nobody ended does not keep its group from being whole."""
    monkeypatch.setattr(scheduler, "FIRST_PAUSE_S", 0.0)

    class Losing:
        """The first attempt dies without its session being ended."""

        async def play(self, plan: EpisodePlan) -> EpisodeResult:
            fields: Any = {**plan.options, "session_id": plan.session_id}
            session = client.start_session(plan.task.task_id, **fields)
            if plan.attempt == 0:
                return EpisodeResult(plan.task.task_id, plan.sample, 0, plan.session_id, failure="worker")
            session.end(outcome="Finished")
            return EpisodeResult(plan.task.task_id, plan.sample, 1, plan.session_id)

        async def close(self) -> None:
            """Nothing to close."""

    chosen = RunOptions(agent=f"{AGENTS}:asks", url=url, folder=None, retries=1)
    played = await run_episodes(chosen, [{"question": "q"}], executor=Losing())
    assert [each["session_id"] for each in sessions(client, played)] == played.session_ids
    assert [each["status"] for each in sessions(client, played, withdrawn=True)] == ["ended"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"agent": None}, "nothing plays"),
        ({"agent": "no.such_module:Agent"}, "agent 'no.such_module:Agent': there is no module"),
        ({"agent": f"{AGENTS}:TASKS"}, "is not an agent"),
        ({"reward": f"{AGENTS}:nothing"}, "--reward"),
        ({"agent": "tool_agnt"}, "agent loop 'tool_agnt' is not registered"),
        ({"reward": f"{AGENTS}:TASKS"}, "is not a function but 'list'"),
        ({"reward": f"{AGENTS}:asks"}, "has the parameter 'base_url', which is none of"),
        ({"scorer": (f"{AGENTS}:TASKS",)}, "is not a scorer but 'list'"),
        ({"scorer": (f"{AGENTS}:asks",)}, "does not say what it scores"),
        ({"data": None}, "--data is missing"),
        ({"url": None}, "--url is missing"),
        ({"url": "http://127.0.0.1:9"}, "--url http://127.0.0.1:9"),
        ({"group_size": 0}, "--group-size must be between 1 and 1000, not 0"),
        ({"timeout_s": "soon"}, "--timeout-s must be a number, not 'soon'"),
        ({"retry_on": ("bugs",)}, "--retry-on must be one of agent, timeout"),
        ({"executor": "threads"}, "--executor must be one of local, process, ray"),
        ({"workers": 2}, "--workers applies to --executor process"),
        ({"ray_cpus": 1.0}, "--ray-cpus applies to --executor ray"),
        ({"session": {"group_id": "g"}}, "--session group_id cannot be given"),
        ({"session": {"discont": 1}}, "--session discont is not a field of start_session; known: discount"),
        ({"name": "a/b"}, "--name a/b must be letters"),
        ({"name": "n", "folder": None}, "--name needs --folder"),
        ({"export": {"layout": "tree"}, "validation": True}, "nothing is exported, so layout has no effect"),
        ({"command": ("x",)}, "not both"),
        ({"sampling": {"temprature": 1}}, "the server refuses sessions with these options: 'sampling.temprature'"),
        ({"limits": {"max_turns": 0}}, "the server refuses sessions with these options: 'limits.max_turns'"),
        ({"export": {"layout": "rings"}}, "the export would be refused: 'layout'"),
        ({"export": {"format": "xml"}}, "--format must be one of"),
        ({"export": {"limit": 3}}, "--page-size applies to a folder"),
        ({"output": "x.npz", "group_size": 501}, "a file of format npz holds at most 1000 sessions"),
        ({"output": "x.npz", "export": {"format": "jsonl"}}, "names format npz, and --format says jsonl"),
    ],
)
async def test_an_option_that_does_not_fit_is_named_before_anything_is_played(
    tmp_path: Path, data: str, url: str, change: dict[str, Any], told: str
) -> None:
    given = {"agent": f"{AGENTS}:asks", "data": data, "url": url, "folder": str(tmp_path / "runs"), **change}
    with mock.patch("tokengrove.runs.run.Run.play") as playing, pytest.raises(ConfigurationError) as raised:
        await run_episodes(RunOptions(**given))
    assert told in str(raised.value)
    playing.assert_not_called()
    assert kept_runs(tmp_path) == []


@pytest.mark.parametrize("key", [None, "another-key-than-that"])
async def test_a_key_that_starts_no_sessions_is_named_before_anything_is_played(
    tmp_path: Path, key: str | None
) -> None:
    chosen = RunOptions(agent=f"{AGENTS}:asks", folder=None, admin_key=key)
    with real_server(tmp_path, admin_key="the-key-of-the-server") as url, pytest.raises(ConfigurationError) as raised:
        await run_episodes(replace(chosen, url=url), ROWS)
    assert str(raised.value).startswith("--admin-key: the server starts no sessions for it")
