"""An export streamed to disk, as one file per page or as a single file. A file exists whole or not at all.

Each page is read back before it gets its final name, so the summary counts the files' contents, and an unreadable file
never appears. In `jsonl`, a file contains samples only. The last line of an answer, with the cursor and the session
entries, is removed, because table readers would read it as a broken row.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import unquote

import httpx

from tokengrove.client.operations import Call, Repeat
from tokengrove.client.readers.read import READERS, check_readable, read_page, suffix
from tokengrove.client.retries import RETRY_S
from tokengrove.client.tally import Tally
from tokengrove.client.transport import TIMEOUT_S, Connection, decode
from tokengrove.client.unreachable import ServerUnreachable
from tokengrove.client.values import Json
from tokengrove.errors import ConfigurationError, InvalidRequest, ProxyError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_LINES = "jsonl"
_PAGE_SESSIONS = 100
# The most sessions in one page.
_MOST_SESSIONS = 1000


def export_files(
    url: str,
    admin_key: str | None,
    output: str | Path,
    request: Mapping[str, Json],
    format: str,
    *,
    quiet: bool = False,
    retry_s: float = RETRY_S,
) -> Tally:
    """Write every page of an export to `output`; unless `quiet`, show a progress bar and a summary on stderr.

    `output` is a folder, or a file if its name ends like a format (.npz). A file contains one page of at most 1000
    sessions; a .jsonl file contains all pages. `request` is the body of `/trajectories/export` without format and
    cursor. Like `Client`, this retries the request of each page for up to `retry_s` seconds until the answer begins. If
    the server is unreachable at the first page, it raises ServerUnreachable at once. Raises ConfigurationError if the
    output cannot be created or written or already contains an export, and a server's error as its class in
    `tokengrove.errors`. After an error, the summary covers the pages that are in the folder.
    """
    from rich.console import Console
    from rich.filesize import decimal

    target, console = Path(output), Console(stderr=True, quiet=quiet)
    whole = _is_file(output)
    request = _with_page_size(request, whole=whole)
    _check_lines(request, format)
    connection = Connection(url, admin_key, TIMEOUT_S, retry_s=retry_s)
    tally, layout = Tally(uncounted=_unreadable(format)), str(request.get("layout") or "concat")
    try:
        with _one_file(target) if whole else _folder(output) as folder, _progress(console) as progress:
            named = request.get("session_ids")
            task = progress.add_task("exporting", total=len(named) if named else None)

            def show(received: int) -> None:
                written = f"{tally.sessions} sessions, {decimal(tally.size + received)}"
                progress.update(task, description=written, completed=tally.sessions)

            writer = _Writer(format, layout, tally, show)
            for path, response in _pages(connection, folder, request, format):
                if whole and format != _LINES and _cursor(response) is not None:
                    raise ConfigurationError(
                        f"-o {output}: a file of format {format} holds at most {_MOST_SESSIONS} sessions; give a folder"
                    )
                with _reachable(connection):
                    writer.write(path, response)
    except (ProxyError, ConfigurationError):
        if tally.files and not whole:
            _show(console, tally, f"interrupted: only {_written(tally, target)}", layout)
        raise
    _show(console, tally, _written(tally, target), layout)
    return tally


def _unreadable(format: str) -> str | None:
    """Return the reason why pages of the format cannot be read back here, or None. They are written in either case."""
    if format not in READERS:
        return f"this client does not know format {format}"
    try:
        check_readable(format)
    except InvalidRequest as error:
        return error.message
    return None


def format_of(output: str | Path, asked: str | None) -> str:
    """The format to write: the suffix of a file, which may not differ from `asked`; for a folder, `asked` or jsonl."""
    name = Path(output)
    if not _is_file(output):
        return asked or _LINES
    named = name.suffix[1:]
    if asked is not None and suffix(asked) != named:
        raise ConfigurationError(f"-o {output} names format {named}, and --format says {asked}: give one of them")
    return asked or named


def _is_file(output: str | Path) -> bool:
    """Whether the output is a single file: its name ends like a format, and it is not a folder."""
    return Path(output).suffix[1:] in set(map(suffix, READERS)) and not Path(output).is_dir()


def _with_page_size(request: Mapping[str, Json], *, whole: bool) -> dict[str, Json]:
    given = request.get("limit")
    whole = whole or (request.get("layout") == "forest" and given is None)  # a group must be on one page to merge
    if whole and given is not None:
        raise ConfigurationError("--limit (--page-size) applies to a folder: a file holds all sessions")
    return {**request, "limit": given or (_MOST_SESSIONS if whole else _PAGE_SESSIONS)}


def _check_lines(request: Mapping[str, Json], format: str) -> None:
    """Raise ConfigurationError for options that a jsonl file does not support."""
    asked = [f"--images {request['images']}"] if request.get("images") == "bytes" else []
    asked += ["--multi-modal-inputs"] if request.get("multi_modal_inputs") else []
    if asked and format == _LINES:
        raise ConfigurationError(f"{asked[0]}: a jsonl file holds samples only; give --format npz, or another")


@contextmanager
def _one_file(target: Path) -> Iterator[Path]:
    """A folder for pages, which are concatenated to the file `target` at the end of the block."""
    if target.exists():
        raise ConfigurationError(f"-o {target} exists already; give another name")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            yield Path(folder)
            first, *rest = sorted(Path(folder).iterdir())
            with first.open("ab") as joined:
                for page in rest:
                    with page.open("rb") as more:
                        copyfileobj(more, joined)
            first.rename(target)
    except OSError as error:
        raise ConfigurationError(f"-o {target}: {error.strerror}") from error


@contextmanager
def _folder(folder: str | Path) -> Iterator[Path]:
    """The folder for the pages, which has no pages yet. Raises ConfigurationError."""
    if str(folder) == "-":
        raise ConfigurationError("an export with --url writes files: give a folder with -o FOLDER, or a file")
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"-o {folder} is a file; give a folder: an export with --url writes one file a page")
    try:
        target.mkdir(parents=True, exist_ok=True)
        taken = next(target.glob("page-*"), None)
    except OSError as error:
        raise ConfigurationError(f"-o {folder}: {error.strerror}") from None
    if taken is not None:
        raise ConfigurationError(f"-o {folder} already holds an export ({taken.name}); give another folder")
    yield target


def _pages(
    connection: Connection, folder: Path, request: Mapping[str, Json], format: str
) -> Iterator[tuple[Path, httpx.Response]]:
    """Yield each page as a streaming response, with the path of its file."""
    body: dict[str, Json] = {name: value for name, value in request.items() if value is not None}
    body["format"] = format
    for number in itertools.count():
        wait_s = body.get("wait_s", 0.0)
        call = Call("POST", "/trajectories/export", body, extra_timeout_s=wait_s, repeat=Repeat.READS)
        with _answered(connection, call, first=number == 0) as response:
            yield folder / f"page-{number:05}.{suffix(format)}", response
        cursor = _cursor(response)
        if cursor is None:
            return
        body["cursor"] = unquote(cursor)


def _cursor(response: httpx.Response) -> str | None:
    """The cursor of the next page, percent-encoded; None on the last page."""
    cursor: str | None = response.headers.get("x-tokengrove-cursor")
    return cursor


@contextmanager
def _answered(connection: Connection, call: Call, *, first: bool) -> Iterator[httpx.Response]:
    attempts = connection.attempts(call, None)
    while True:
        with ExitStack() as opened:
            try:
                response = _begun(connection, call, opened)
            except ProxyError as error:
                if first and isinstance(error, ServerUnreachable):
                    raise
                pause_s = attempts.pause_s(error)
            else:
                with _reachable(connection):
                    yield response
                return
        connection.clock.sleep(pause_s)


def _begun(connection: Connection, call: Call, opened: ExitStack) -> httpx.Response:
    """The streaming answer to a call, which `opened` closes. Raises the server's error, or ServerUnreachable."""
    with _reachable(connection):
        response = opened.enter_context(httpx.stream(**connection.arguments(call)))
        if not response.is_success:
            response.read()
            decode(response)
    if "x-tokengrove-sessions" not in response.headers:
        raise ProxyError(
            "the answer lacks the header x-tokengrove-sessions; is it a tokengrove server of this version?"
        )
    return response


@contextmanager
def _reachable(connection: Connection) -> Iterator[None]:
    """Raise ServerUnreachable if the connection fails, also in the middle of an answer."""
    try:
        yield
    except httpx.TransportError as error:
        raise connection.unreachable(error) from error


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes pages and counts them. `show` is called with the number of bytes received of the current page."""

    format: str
    layout: str
    tally: Tally
    show: Callable[[int], None]

    def write(self, path: Path, response: httpx.Response) -> None:
        """Write one page.

        Raises InvalidRequest if it cannot be read back, and ConfigurationError if it cannot be written. In both cases,
        there is no file.
        """
        part, tally = path.with_name(f".{path.name}.part"), self.tally
        try:
            with open(part, "wb", opener=_private) as file:
                for chunk in response.iter_bytes():
                    file.write(chunk)
                    self.show(file.tell())
            if tally.uncounted is None:
                self._count(part)
            tally.size += part.stat().st_size
            part.rename(path)
        except OSError as error:
            raise ConfigurationError(f"-o {path.parent}: {error.strerror}") from error
        finally:
            part.unlink(missing_ok=True)
        tally.files += 1
        tally.sessions += int(response.headers["x-tokengrove-sessions"])
        withdrawn = int(response.headers.get("x-tokengrove-left-out-withdrawn", 0))
        tally.withdrawn += withdrawn
        tally.validation += int(response.headers.get("x-tokengrove-left-out", 0)) - withdrawn
        tally.incomplete += int(response.headers["x-tokengrove-incomplete"])
        self.show(0)

    def _count(self, part: Path) -> None:
        page = read_page(part, self.format)
        if self.format == _LINES:
            if "cursor" not in page.end:
                raise InvalidRequest(
                    f"the answer was cut off: the last line of {part} is missing; export again", param="source"
                )
            _cut_last_line(part)
        self.tally.count(page, self.layout)


def _private(name: str, flags: int) -> int:
    """Open a file; a new one is private to its owner, because exports contain conversations."""
    return os.open(name, flags, 0o600)


def _cut_last_line(path: Path) -> None:
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            start = text.rfind(b"\n", 0, len(text) - 1) + 1
        file.truncate(start)


def _progress(console: Console) -> Progress:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _written(tally: Tally, target: Path) -> str:
    from rich.filesize import decimal

    if not target.is_dir():
        return f"{decimal(tally.size)} in {target}"
    return f"{tally.files} file{'s' * (tally.files != 1)}, {decimal(tally.size)} in {target}"


def _show(console: Console, tally: Tally, title: str, layout: str) -> None:
    from rich.table import Table

    table = Table(title=title, show_header=False)
    for name, value in tally.rows(layout):
        table.add_row(name, value)
    console.print(table)
