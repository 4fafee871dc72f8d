"""An export as files, one a page: what the server answers, written as it comes. A file is there whole or not at all.

`json` is a page as it was answered, `jsonl` its samples, one a line; any other format is the server's own and its bytes
are not looked into. What a page holds is counted where it is JSON; how many sessions it has and how many of them lack
a call, the server says in headers, in any format.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httpx
import orjson

from proxy.client.operations import Call
from proxy.client.values import Json
from proxy.client.wire import TIMEOUT_S, Connection, read
from proxy.errors import ConfigurationError, ProxyError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_LINES = "jsonl"
_JSON = ("json", _LINES)
# What a file is called whose format has another name.
_SUFFIXES = {"areal": "json"}


@dataclass(slots=True)
class Tally:
    """What an export holds. The counts of `samples` and below are None where the format was not JSON.

    `tokens` are those of the samples, `trained` of them have loss mask 1. `forks` are samples beyond one a session (of
    layout concat), `unaligned` turns that could not be joined with the one before.
    """

    sessions: int = 0
    incomplete: int = 0
    files: int = 0
    size: int = 0
    samples: int | None = 0
    tokens: int = 0
    trained: int = 0
    forks: int = 0
    unaligned: int = 0
    rewards: list[float] = field(default_factory=list)

    def count(self, page: Mapping[str, Json]) -> None:
        """Add a page in JSON."""
        samples = page["samples"]
        self.samples = (self.samples or 0) + len(samples)
        self.tokens += sum(len(sample.get("input_ids", ())) for sample in samples)
        self.trained += sum(sum(sample.get("loss_mask", ())) for sample in samples)
        self.rewards += [sample["rewards"][0] for sample in samples if sample.get("rewards")]
        self.forks += len(samples) - len({sample["session_id"] for sample in samples})
        self.unaligned += sum(entry["unaligned"] for entry in page["sessions"].values())


def export_files(
    url: str, admin_key: str | None, folder: str | Path, request: Mapping[str, Json], format: str
) -> Tally:
    """Write every page of an export into `folder`, with a progress bar, and print the summary on stderr.

    `request` is the body of `/export_trajectories` without format and cursor. Raises ConfigurationError for a folder
    that cannot be or that holds an export already, and the server's errors as their `proxy.errors` classes.
    """
    from rich.console import Console

    target, console = _prepared(folder), Console(stderr=True)
    tally = Tally(samples=0 if format in _JSON else None)
    with _progress(console) as progress:
        task = progress.add_task("exporting", total=None)
        for path, response in _pages(Connection(url, admin_key, TIMEOUT_S), target, request, format):
            _write(path, response, format, tally)
            progress.update(task, description=f"{tally.sessions} sessions, {tally.size / 1e6:.1f} MB")
    _show(console, tally, target, request.get("layout"))
    return tally


def _prepared(folder: str | Path) -> Path:
    if str(folder) == "-":
        raise ConfigurationError("give -o FOLDER: an export with --url writes one file a page")
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        taken = next(target.glob("page-*"), None)
    except OSError as error:
        raise ConfigurationError(f"-o {folder}: {error.strerror}") from None
    if taken is not None:
        raise ConfigurationError(f"{target} holds an export already ({taken.name}); give another folder")
    return target


def _pages(
    connection: Connection, folder: Path, request: Mapping[str, Json], format: str
) -> Iterator[tuple[Path, httpx.Response]]:
    """Each page while it streams, with the file that it goes to."""
    asked = "json" if format == _LINES else format
    body: dict[str, Json] = {name: value for name, value in request.items() if value is not None}
    body["format"] = asked
    for number in itertools.count():
        call = Call("POST", "/export_trajectories", body)
        with _answered(connection, call) as response:
            yield folder / f"page-{number:05}.{_SUFFIXES.get(format, format)}", response
        cursor = response.headers.get("x-tokengrove-cursor")
        if cursor is None:
            return
        body["cursor"] = unquote(cursor)


@contextmanager
def _answered(connection: Connection, call: Call) -> Iterator[httpx.Response]:
    try:
        with httpx.stream(**connection.arguments(call)) as response:
            if not response.is_success:
                response.read()
                read(response)
            if "x-tokengrove-sessions" not in response.headers:
                raise ProxyError("the answer does not say what it holds; is it a tokengrove server of this version?")
            yield response
    except httpx.TransportError as error:
        raise connection.unreachable(error) from error


def _write(path: Path, response: httpx.Response, format: str, tally: Tally) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            for chunk in _contents(response, format, tally):
                tally.size += file.write(chunk)
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)
    tally.files += 1
    tally.sessions += int(response.headers["x-tokengrove-sessions"])
    tally.incomplete += int(response.headers["x-tokengrove-incomplete"])


def _contents(response: httpx.Response, format: str, tally: Tally) -> Iterator[bytes]:
    if format not in _JSON:
        yield from response.iter_bytes()
        return
    response.read()
    page = read(response)
    tally.count(page)
    if format == _LINES:
        yield from (orjson.dumps(sample) + b"\n" for sample in page["samples"])
    else:
        yield response.content


def _progress(console: Console) -> Progress:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _show(console: Console, tally: Tally, folder: Path, layout: Any) -> None:
    from rich.table import Table

    table = Table(title=f"{tally.files} files, {tally.size / 1e6:.1f} MB in {folder}", show_header=False)
    for name, value in _facts(tally, layout):
        table.add_row(name, value)
    console.print(table)


def _facts(tally: Tally, layout: Any) -> Iterator[tuple[str, str]]:
    yield "sessions", str(tally.sessions)
    if tally.samples is not None:
        mean = sum(tally.rewards) / len(tally.rewards) if tally.rewards else None
        yield "samples", str(tally.samples)
        yield "tokens", str(tally.tokens)
        yield "trained tokens", str(tally.trained)
        yield "mean return", "none" if mean is None else f"{mean:.4f}"
        forks = f"{tally.forks} samples beyond one a session, " if layout == "concat" else ""
        yield "forks", f"{forks}{tally.unaligned} turns unaligned"
    missing = tally.incomplete
    yield "complete", "all" if not missing else f"{tally.sessions - missing}, {missing} lack a call"
