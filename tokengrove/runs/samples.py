"""The training samples of a run: exactly those of its own sessions, whatever else the server stores."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokengrove.client import AsyncClient
from tokengrove.client.export_files import export_files, format_of
from tokengrove.client.readers.read import READERS, suffix
from tokengrove.client.tally import Tally
from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.rollout.episodes import EpisodeResult, Server
from tokengrove.rollout.run_options import RunOptions
from tokengrove.runs.slots import RUN

_MOST_NAMED = 10_000
"""The most sessions that an export names; more are selected by the run's id."""
_LINES = "jsonl"
_MOST_IN_A_FILE = 1000
"""The most sessions in one file, except for jsonl."""


class Samples:
    """The target of the samples. `mine`: an export that an earlier start of this run wrote, which is replaced."""

    def __init__(self, options: RunOptions, episodes: int, folder: Path | None, mine: str | None) -> None:
        """Raises ConfigurationError if the target exists, or does not fit the format or the number of episodes."""
        given = dict(options.export)
        asked = given.pop("format", None)
        if asked not in (None, *READERS):
            raise ConfigurationError(f"--format must be one of {', '.join(READERS)}, not {asked!r}")
        many = episodes > _MOST_IN_A_FILE and asked not in (None, _LINES)
        if options.output is None:
            assert folder is not None
            self.target = folder / ("samples" if many else f"samples.{suffix(asked or _LINES)}")
        else:
            self.target = Path(options.output).expanduser()
        self._format = format_of(self.target, asked)
        self._is_file = self.target.suffix[1:] == suffix(self._format) and not self.target.is_dir()
        if self._is_file and "limit" in given:
            raise ConfigurationError(f"--page-size applies to a folder, and --output {self.target} is a file")
        if episodes > _MOST_IN_A_FILE and self._format != _LINES and self._is_file:
            raise ConfigurationError(
                f"--output {self.target}: a file of format {self._format} holds at most {_MOST_IN_A_FILE} sessions, "
                f"and there are {episodes} episodes; give a folder, or a .jsonl file"
            )
        self._fields = given
        self._with_failed = options.export_failed
        self._validation = options.validation
        inside = folder is not None and self.target.parent == folder
        if not inside and str(self.target) != mine and _is_taken(self.target):
            raise ConfigurationError(f"--output {self.target} exists already; give another name")

    async def check(self, client: AsyncClient, run_id: str) -> None:
        """Request an empty export with these options, because after the run it would be too late for an error.

        Raises ConfigurationError if the server refuses the options.
        """
        nothing = {**self._fields.get("filter", {}), "group_id": run_id}
        options: Any = {name: value for name, value in self._fields.items() if name not in ("filter", "limit")}
        try:
            await client.export(filter=nothing, **options)  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise ConfigurationError(f"the export would be refused: {error.message}") from None

    def write(self, server: Server, run_id: str, results: Sequence[EpisodeResult]) -> Tally:
        """Export the sessions of these results, and replace an earlier export. Blocks.

        Raises ConfigurationError if the target cannot be written, and the server's error.
        """
        kept = [result.session_id for result in results if self._with_failed or result.failure is None]
        _remove(self.target)
        request = self._request(run_id, kept)
        return export_files(server.url, server.admin_key, self.target, request, self._format, quiet=True)

    def _request(self, run_id: str, session_ids: Sequence[str]) -> dict[str, Any]:
        if len(session_ids) <= _MOST_NAMED:
            return _merged({"session_ids": list(session_ids)}, self._fields)
        which: dict[str, Any] = {"metadata": {RUN: run_id}, "validation": "include" if self._validation else "skip"}
        if not self._with_failed:
            which["outcome"] = "Finished"
        return _merged({"filter": which}, self._fields)


def _merged(selection: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The body of an export. A filter in the options, such as a weight version, selects among the run's sessions."""
    given, own = fields.get("filter", {}), selection.get("filter", {})
    chosen = {**given, **own}
    if "metadata" in given and "metadata" in own:
        chosen["metadata"] = {**given["metadata"], **own["metadata"]}
    return {**fields, **selection, **({"filter": chosen} if chosen else {})}


def _is_taken(target: Path) -> bool:
    return next(target.glob("page-*"), None) is not None if target.is_dir() else target.exists()


def _remove(target: Path) -> None:
    """Remove an earlier export of this run: a file, or the pages in a folder."""
    try:
        if not target.is_dir():
            target.unlink(missing_ok=True)
            return
        for page in target.glob("page-*"):
            page.unlink() if page.is_file() else shutil.rmtree(page)
    except OSError as error:
        raise ConfigurationError(f"--output {target}: {error.strerror}") from None
