"""The tasks of a run. Their ids are the same whenever the same data is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from tokengrove.client.exit_reason import exit_reason
from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.rollout.episodes import Task
from tokengrove.rollout.harbor import is_harbor
from tokengrove.rollout.harbor import tasks as harbor_tasks
from tokengrove.rollout.imports import load
from tokengrove.runs.rows import Row, Rows, in_json, rows_of

_ID = "task_id"
_DIGEST_BYTES = 8


def tasks_of(data: str, id_field: str | None = None, limit: int | None = None) -> list[Task]:
    """Read the tasks of a file, of a folder of Harbor tasks, or of `package.module:tasks`.

    `package.module:tasks` names an iterable of mappings or of `Task`, or a function without arguments that returns one.
    `limit`: read only the first tasks. Raises ConfigurationError, with the place of the error, and for data without
    tasks.
    """
    path = Path(data).expanduser()
    if path.exists() or ":" not in data:
        found = _of_path(path, id_field, limit)
    else:
        found = as_tasks(_loaded(data), data, id_field, limit)
    if not found:
        raise ConfigurationError(f"--data {data} has no tasks")
    return found


def as_tasks(
    items: Iterable[object], source: str = "tasks", id_field: str | None = None, limit: int | None = None
) -> list[Task]:
    """Tasks of a trainer: each a `Task`, or a mapping as in a row of a file. Raises ConfigurationError."""
    placed = ((f"{source}, item {number}", item) for number, item in enumerate(islice(items, limit), 1))
    return _unique((place, _task(place, item, number, id_field)) for number, (place, item) in enumerate(placed))


def digest_of(tasks: Sequence[Task]) -> str:
    """A digest of the tasks."""
    state = blake2b(digest_size=_DIGEST_BYTES)
    for task in tasks:
        what = [task.task_id, task.data, task.options]
        state.update(orjson.dumps(what, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS, default=repr))
    return state.hexdigest()


def _of_path(path: Path, id_field: str | None, limit: int | None) -> list[Task]:
    if not path.exists():
        raise ConfigurationError(f"--data {path}: there is no such file; a Python object is package.module:tasks")
    if is_harbor(path):
        return harbor_tasks(path)[:limit]
    if path.is_dir():
        raise ConfigurationError(f"--data {path} is a folder without Harbor tasks (folders with a task.toml)")
    return _of_rows(rows_of(path), id_field, limit)


def _of_rows(rows: Rows, id_field: str | None, limit: int | None) -> list[Task]:
    return _unique(
        (place, _of_row(place, row, number, id_field)) for number, (place, row) in enumerate(islice(rows, limit))
    )


def _task(place: str, item: object, number: int, id_field: str | None) -> Task:
    if isinstance(item, Task):
        return item
    return _of_row(place, in_json(place, item), number, id_field)


def _of_row(place: str, row: Row, number: int, id_field: str | None) -> Task:
    """The task of a row. Its id is the field's value, else the unique row number with a digest of the row."""
    field = id_field or _ID
    value = row.get(field)
    if value is None and id_field is not None:
        raise ConfigurationError(f"{place}: the task has no {id_field!r} (--task-id-field)")
    if value is None:
        digest = blake2b(orjson.dumps(row, option=orjson.OPT_SORT_KEYS), digest_size=4).hexdigest()
        return Task(f"{number}-{digest}", row)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ConfigurationError(f"{place}: the task's id {field!r} must be text or a whole number, not {value!r}")
    if "\0" in str(value):
        raise ConfigurationError(f"{place}: the task's id {value!r} has a NUL, which no session's metadata can have")
    return Task(str(value), row)


def _unique(placed: Iterator[tuple[str, Task]]) -> list[Task]:
    places: dict[str, str] = {}
    tasks = []
    for place, task in placed:
        if (before := places.setdefault(task.task_id, place)) is not place:
            raise ConfigurationError(f"{place}: the task's id {task.task_id!r} is that of {before}, too")
        tasks.append(task)
    return tasks


def _loaded(path: str) -> Iterable[Any]:
    try:
        found = load(path)
    except InvalidRequest as error:
        raise ConfigurationError(f"--data {error.message}") from None
    found = _returned(path, found) if callable(found) else found
    if not isinstance(found, Iterable) or isinstance(found, str | bytes):
        raise ConfigurationError(f"--data {path} is {type(found).__name__}, not an iterable of tasks")
    return found


def _returned(path: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        raise ConfigurationError(f"--data {path}: it cannot be called for the tasks: {exit_reason(error)}") from error
