"""The folder of one run: its options, its journal, its summary and its samples.

A run is resumed by its name with the same options. A start with the same name and other options is refused: its
episodes would be counted and compared with those of other agents or tasks.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from tokengrove.errors import ConfigurationError
from tokengrove.old_names import with_new_names
from tokengrove.options.option import flag_of
from tokengrove.rollout.episodes import Task
from tokengrove.rollout.run_options import RunOptions
from tokengrove.runs.journal import Journal
from tokengrove.runs.tasks import digest_of

_SAME = (
    *("agent", "command", "agent_arg", "reward", "scorer", "group_size", "passes", "seed", "sampling"),
    *("sampling_policy", "limits", "session", "metadata", "validation"),
)
"""Options that define the episodes. Other options only affect how they are played, and may change on a resume."""

_VARIABLES = ("env", "verifier_env")
"""Arguments of commands that are written with digests in place of their values."""

_RUN, _JOURNAL = "run.json", "journal.jsonl"
_NAME = re.compile(r"[\w.-]+")
_NOT_OF_A_NAME = re.compile(r"[^\w.-]+")
_STEM_LENGTH = 40


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a run. `run_id` marks its sessions; `seed` is the given seed, or one drawn for this run."""

    run_id: str
    seed: int
    created_at: float
    what: Mapping[str, Any]

    @classmethod
    def drawn(cls, options: RunOptions, tasks: Sequence[Task]) -> Identity:
        seed = secrets.randbits(31) if options.seed is None else options.seed
        return cls(secrets.token_hex(6), seed, time.time(), _what(options, tasks))


class RunFolder:
    """The folder of a run that this process plays. `resumed`: an earlier start of the run exists."""

    def __init__(self, path: Path, identity: Identity, journal: Journal, *, resumed: bool, created: bool) -> None:
        self.path, self.identity, self.journal, self.resumed = path, identity, journal, resumed
        self._created = created

    @classmethod
    def open(cls, options: RunOptions, tasks: Sequence[Task]) -> RunFolder:
        """Create the run's folder, or open it to resume the run.

        Raises ConfigurationError if the folder has a different run, with the difference, or if the run is being played.
        """
        path = _path(options, tasks)
        created = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            journal = Journal(path / _JOURNAL)
        except OSError as error:
            raise ConfigurationError(f"--folder {options.folder}: {path}: {error.strerror}") from None
        try:
            before = _read(path / _RUN)
            identity = before or Identity.drawn(options, tasks)
            _check_same(path, identity.what, _what(options, tasks))
            if before is None:
                _write(path / _RUN, _as_json(identity))
        except BaseException:
            journal.close()
            raise
        return cls(path, identity, journal, resumed=before is not None, created=created)

    @property
    def output(self) -> str | None:
        """The path to which an earlier start of this run has written its samples; None if there is none."""
        found: str | None = _summary(self.path).get("output")
        return found

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        _write(self.path / "summary.json", summary)

    def close(self) -> None:
        """Let other processes resume the run. The folder of a run that never began is removed unless it has other
        files.
        """
        names = {file.name for file in self.path.iterdir()}
        if self._created and names == {_JOURNAL, _RUN} and not self.journal.written:
            for name in names:
                (self.path / name).unlink()
            self.path.rmdir()
        self.journal.close()


def _path(options: RunOptions, tasks: Sequence[Task]) -> Path:
    """The folder of the named run; without a name, the first folder that is new or has an unfinished run."""
    folder = Path(options.folder or ".").expanduser()
    if options.name is not None:
        if not _NAME.fullmatch(options.name) or options.name in (".", ".."):
            raise ConfigurationError(f"--name {options.name} must be letters, digits and _ . - only")
        return folder / options.name
    base = _base_name(options, tasks)
    return next(path for path in _candidates(folder, base) if not _is_over(_summary(path), options))


def _is_over(summary: Mapping[str, Any], options: RunOptions) -> bool:
    if not summary.get("complete") or (options.retry_failed and summary.get("failed")):
        return False
    exportable = summary.get("done") or (options.export_failed and summary.get("failed"))
    return not (options.exports and exportable) or summary.get("output") is not None


def _summary(path: Path) -> dict[str, Any]:
    """The summary of the last start; empty if no start has written one."""
    return _json_of(path / "summary.json") or {}


def _candidates(folder: Path, base: str) -> Iterator[Path]:
    return (folder / (base if number == 1 else f"{base}-{number}") for number in count(1))


def _base_name(options: RunOptions, tasks: Sequence[Task]) -> str:
    """The data's name and a digest of the run's definition: the same command has the same name."""
    stem = Path((options.data or "tasks").rpartition(":")[2]).stem or "tasks"
    what = orjson.dumps(_what(options, tasks), option=orjson.OPT_SORT_KEYS)
    return f"{_NOT_OF_A_NAME.sub('-', stem)[:_STEM_LENGTH]}-{blake2b(what, digest_size=4).hexdigest()}"


def _what(options: RunOptions, tasks: Sequence[Task]) -> dict[str, Any]:
    """The definition of a run, in JSON's types, which must not change on a resume."""
    what = {name: getattr(options, name) for name in _SAME}
    what["agent_arg"] = {name: _without_secrets(name, value) for name, value in options.agent_arg.items()}
    data = {"tasks": len(tasks), "data": digest_of(tasks)}
    plain: dict[str, Any] = orjson.loads(
        orjson.dumps({**what, **data}, default=_plain, option=orjson.OPT_NON_STR_KEYS)  # YAML has numbers as keys
    )
    return plain


def _without_secrets(name: str, value: Any) -> Any:
    """Replace variables with digests: they may be keys, which must not be in files or messages."""
    if name not in _VARIABLES or not isinstance(value, Mapping):
        return value
    return {key: f"digest {blake2b(str(each).encode(), digest_size=8).hexdigest()}" for key, each in value.items()}


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else repr(value)


def _check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in now.items():
        if before.get(name) == value:
            continue
        told = {
            "tasks": f"it had {before.get('tasks')} tasks, now there are {value}",
            "data": "the tasks of --data are others",
        }.get(name, f"{flag_of(name)} was {_told(before.get(name))} and is now {_told(value)}")
        raise ConfigurationError(f"the run in {path} is another one: {told}; give another --name, or the same options")


def _told(value: Any) -> str:
    return "not given" if value in (None, [], {}) else orjson.dumps(value).decode()


def _as_json(identity: Identity) -> dict[str, Any]:
    return {
        "run_id": identity.run_id,
        "seed": identity.seed,
        "created_at": identity.created_at,
        "what": dict(identity.what),
    }


def _read(path: Path) -> Identity | None:
    """The contents of `run.json`; None without the file: a killed process may have left a folder without it."""
    found = _json_of(path)
    if found is None:
        return None
    return Identity(found["run_id"], found["seed"], found["created_at"], with_new_names(found["what"]))


def _json_of(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (orjson.JSONDecodeError, OSError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    return found


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that exists whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
