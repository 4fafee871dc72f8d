"""Harbor tasks as the data of a run: one folder, a folder of such folders, or a registry file that lists folders.

Tasks are in the order of their paths, so a task has the same position in every run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokengrove.errors import ConfigurationError
from tokengrove.rollout.episodes.task import Task
from tokengrove.rollout.harbor.task_folder import CONFIG, BadTask, TaskFolder

FOLDER = "harbor"
"""The key of the task's folder in the task's data."""

_DEEPEST = 6
_SHOWN = 20


def is_harbor(path: Path) -> bool:
    """Whether `path` seems to contain Harbor tasks. The tasks are not read."""
    if path.is_dir():
        return next(_folders(path), None) is not None
    return path.suffix == ".json" and path.is_file() and _registry(path) is not None


def tasks(path: Path) -> list[Task]:
    """Read all tasks. `data`: `harbor` (the folder), `instruction`, `name`, `metadata`.

    The id of a task in a folder is its path below `path`, or the folder's name if it is `path` itself; in a registry
    file it is the entry's name or path. Raises ConfigurationError if there are no tasks. Tasks that cannot be read are
    listed in a single error.
    """
    found, wrong = [], []
    for task_id, folder in _named(path):
        try:
            found.append(_task(task_id, TaskFolder(folder)))
        except BadTask as error:
            wrong.append(str(error))
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise ConfigurationError("\n".join([*wrong[:_SHOWN], *more]))
    if not found:
        raise ConfigurationError(f"{path} has no Harbor task: no folder with a {CONFIG}")
    return found


def _task(task_id: str, folder: TaskFolder) -> Task:
    data = {
        FOLDER: str(folder.folder),
        "name": folder.name,
        "instruction": folder.instruction,
        # Values without a JSON type, such as dates, become text.
        "metadata": json.loads(json.dumps(folder.config.metadata, default=str)),
    }
    return Task(task_id, data)


def _named(path: Path) -> Iterator[tuple[str, Path]]:
    if path.is_dir():
        yield from ((_id(folder, path), folder) for folder in _folders(path))
        return
    entries = _registry(path) if path.is_file() else None
    if entries is None:
        raise ConfigurationError(f"{path} is neither a folder with Harbor tasks nor a registry file")
    for dataset, entry in entries:
        if entry.get("git_url"):
            raise ConfigurationError(
                f"{path}: the task {entry.get('name')!r} of {dataset!r} is in a git repository, {entry['git_url']}; "
                "clone it and give the folder of the clone"
            )
        yield str(entry.get("name") or entry["path"]), path.parent / str(entry["path"])


def _id(folder: Path, root: Path) -> str:
    return folder.relative_to(root).as_posix() if folder != root else folder.resolve().name


def _folders(root: Path) -> Iterator[Path]:
    """The folders of tasks: `root` itself, or folders below it, or below its folder `tasks` if that has tasks."""
    if (root / CONFIG).is_file():
        yield root
        return
    inner = root / "tasks"
    yield from _below(inner if inner.is_dir() and any(_below(inner, 1)) else root, 1)


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """The folders of tasks below a folder. Tasks are not searched for further tasks, and links are not followed."""
    for each in sorted(folder.iterdir()):
        if each.name.startswith(".") or each.is_symlink() or not each.is_dir():
            continue
        if (each / CONFIG).is_file():
            yield each
        elif depth < _DEEPEST:
            yield from _below(each, depth + 1)


def _registry(file: Path) -> list[tuple[str, dict[str, Any]]] | None:
    """The tasks of a registry file with the names of their data sets; None if it is not a registry file."""
    try:
        datasets = json.loads(file.read_text(encoding="utf-8"))
        return [(each["name"], {**task, "path": task["path"]}) for each in datasets for task in each["tasks"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
