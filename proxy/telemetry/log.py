"""The log of the server: all records of the standard library's logging, including libraries, as lines on stderr.

Modules use `logging.getLogger(__name__)`. Only `tokengrove serve` calls `set_up`; used as a library, the server leaves
the configuration of logging to the program.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
from types import TracebackType
from typing import Any

from proxy.telemetry.log_lines import JsonLines, Line, LineFormatter, PrettyLines
from proxy.telemetry.log_writer import LogWriter

FORMATS = ("pretty", "json")
LEVELS = ("debug", "info", "warning", "error")

AUDIT = "tokengrove.audit"
"""The logger of audit lines, which are written at every log level."""

_OWN = ("proxy", "tokengrove")
_TALKATIVE = ("httpx", "httpcore", "sqlalchemy", "alembic", "urllib3", "asyncio", "filelock", "huggingface_hub")
"""Libraries that log each call at level info, with URLs or texts. Only their warnings and errors are logged."""

_TURNS, _REQUESTS = "proxy.api.turn_lines", "proxy.api.request_lines"

logger = logging.getLogger(__name__)
_writer: LogWriter | None = None
_lock: Any = None


def set_up(form: str, level: str, *, workers: bool = False) -> None:
    """Write the records of this process, and of processes that it forks, to stderr from now on.

    `form`: one of FORMATS; `pretty` at the level `info` has no lines for turns and requests that went well. `level`:
    the level of this server's own records, one of LEVELS; libraries log nothing below `info`. `workers`: several
    processes will write.
    """
    global _writer, _lock
    least = logging.getLevelNamesMapping()[level.upper()]
    if workers:
        _lock = tempfile.TemporaryFile()  # noqa: SIM115  it is closed with the process
    _writer = LogWriter(sys.stderr.fileno(), _lines(form), None if _lock is None else _lock.fileno())
    root = logging.getLogger()
    root.handlers[:] = [_writer]
    root.setLevel(max(least, logging.INFO))
    for name in _OWN:
        logging.getLogger(name).setLevel(least)
    _tell_answers(form == "json" or level != "info")
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(max(least, logging.WARNING))
    logging.getLogger(AUDIT).setLevel(logging.INFO)
    logging.captureWarnings(True)
    sys.excepthook, threading.excepthook, sys.unraisablehook = _on_crash, _on_thread_crash, _on_unraisable
    # No line needs the values that these look up for each record. The documentation of logging names these switches.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def _tell_answers(wanted: bool) -> None:
    """Whether turns and requests that went well have lines: `pretty` is for people, who look for the others."""
    logging.getLogger(_TURNS).setLevel(logging.NOTSET if wanted else logging.WARNING)
    if wanted:
        logging.getLogger(_REQUESTS).removeFilter(_is_no_answer)
    else:
        logging.getLogger(_REQUESTS).addFilter(_is_no_answer)


def _is_no_answer(record: logging.LogRecord) -> bool:
    return record.msg != "request"


def start_writing(worker: int | None = None) -> None:
    """Write in a thread from now on, so that a stalled reader blocks nothing. Call it after the last fork.

    `worker`: the number of this process among the workers of its server.
    """
    if _writer is not None:
        _writer.formatter.worker = worker
        _writer.start()


def tell(teller: logging.Logger, level: int, event: str, fields: dict[str, Any]) -> None:
    """Log a line that every turn has, like `Logger.log`, which takes longer than the line.

    `fields` must not change afterwards. Without `set_up`, or with further handlers, it is a record like any other.
    """
    if not teller.isEnabledFor(level):
        return
    if _writer is None or not _writer.running or logging.root.handlers != [_writer]:
        teller.log(level, event, fields)
        return
    above = teller
    while above.parent is not None:
        if above.handlers or above.filters:
            teller.log(level, event, fields)
            return
        above = above.parent
    _writer.take(Line(teller.name, level, event, fields))


def flush() -> None:
    """Wait until all earlier records are written."""
    if _writer is not None:
        _writer.flush()


def is_json() -> bool:
    """True if `set_up` has selected JSON; then nothing else may be printed."""
    return _writer is not None and isinstance(_writer.formatter, JsonLines)


def _lines(form: str) -> LineFormatter:
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return JsonLines() if form == "json" else PrettyLines(colour=colour)


def _on_crash(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        logger.critical("crash", {"error": kind.__name__}, exc_info=(kind, error, traceback))


def _on_thread_crash(crash: threading.ExceptHookArgs) -> None:
    name = None if crash.thread is None else crash.thread.name
    if crash.exc_value is not None:
        told = (crash.exc_type, crash.exc_value, crash.exc_traceback)
        logger.error("crash", {"error": crash.exc_type.__name__, "thread": name}, exc_info=told)


def _on_unraisable(crash: Any) -> None:
    told = (crash.exc_type, crash.exc_value, crash.exc_traceback)
    logger.error("crash", {"error": crash.exc_type.__name__}, exc_info=told)
