"""Plays a run from the command line, for `rollout` and `eval`: server, progress, signals and exit code."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokengrove.commands.agents_output import agents_on_stderr, few_warnings
from tokengrove.commands.failure import fail, message_of
from tokengrove.commands.run_flags import command_options_of, named_values, run_options_of
from tokengrove.errors import ConfigurationError, ProxyError
from tokengrove.rollout.run_options import RunOptions

if TYPE_CHECKING:
    from tokengrove.rollout.episodes import Server
    from tokengrove.runs import Played, Prepared
    from tokengrove.runs.episodes_run import Stop
    from tokengrove.runs.progress import LiveProgress

INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Asked(NamedTuple):
    """The arguments of the command line. `words`: AGENT, and with a configuration file also its overrides (KEY=VALUE).

    `command`: the words after `--`.
    """

    words: Sequence[str]
    command: Sequence[str]
    config: Path | None
    server: Sequence[str]
    quiet: bool
    as_json: bool
    flags: Mapping[str, Any]
    validation: bool


class _Chosen(NamedTuple):
    options: RunOptions
    server: Mapping[str, Any]
    tasks: Sequence[Any] | None
    model: str | None = None


def run_command(asked: Asked) -> None:
    """Play the run. The exit code is 0, 1 after more failures than allowed, or 130 if it was interrupted."""
    sys.path.insert(0, os.getcwd())  # so that agents and functions of the user can be imported, as with `python -m`
    try:
        with _terminated_as_interrupted():
            code = _run(asked, _chosen(asked))
    except ProxyError as error:
        fail(message_of(error))
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code:
        sys.exit(code)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, like Ctrl-C, for example while the run's own server starts and stops."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _chosen(asked: Asked) -> _Chosen:
    """The options of the file and of the flags. Flags take precedence. Raises ConfigurationError."""
    given = run_options_of(asked.flags)
    words = list(asked.words)
    if words and not (asked.config is not None and _is_change(words[0])):
        given["agent"] = words.pop(0)
    if asked.command:
        given["command"] = tuple(asked.command)
    if words and asked.config is None:
        raise ConfigurationError(f"{words[0]!r} is one word too many: tasks are given by --data, a command behind --")
    given["validation"] = asked.validation
    of_command = command_options_of(asked.flags)
    server = named_values("--server", asked.server)
    if asked.config is None:
        return _Chosen(RunOptions(**_with(given, of_command)), server, None)
    from tokengrove.runs.config import read

    sys.path.insert(0, str(asked.config.resolve().parent))  # modules may be next to the file
    file = read(asked.config, words, given=given, validation=asked.validation)
    options = RunOptions(**_with(file.values, of_command))
    own = {} if options.url is not None else file.server  # with --url, the file's server settings do not apply
    return _Chosen(options, {**own, **server}, file.tasks, file.model)


def _is_change(word: str) -> bool:
    """Whether a word is an override of the file (`KEY=VALUE` or `~KEY`), and not an agent."""
    return "=" in word or word.startswith("~")


def _with(options: Mapping[str, Any], of_command: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with the options of a command added to the arguments of the agent."""
    return {**options, "agent_arg": {**options.get("agent_arg", {}), **of_command}} if of_command else dict(options)


def _run(asked: Asked, chosen: _Chosen) -> int:
    from tokengrove.runs import prepare
    from tokengrove.runs.progress import LiveProgress
    from tokengrove.runs.report import summary_text

    prepared = prepare(chosen.options, chosen.tasks)
    try:
        with (
            agents_on_stderr(),
            LiveProgress(quiet=asked.quiet) as progress,
            few_warnings(),
            _server(prepared, chosen, progress) as server,
        ):
            if prepared.folder is not None:
                progress.say(f"the run is in {prepared.folder.path}")
            interruption = _Interruption(progress)
            played = asyncio.run(interruption.play(prepared, server))
    finally:
        prepared.close()
    print(json.dumps(played.summary.as_json()) if asked.as_json else summary_text(played.summary))
    _tell_what_to_do(played, prepared.options)
    if interruption.came and not played.summary.complete:
        return INTERRUPTED
    exported = not prepared.options.exports or played.summary.output is not None
    return 0 if played.summary.succeeded and exported else 1


@contextmanager
def _server(prepared: Prepared, chosen: _Chosen, progress: LiveProgress) -> Iterator[Server]:
    """The server of --url, or the run's own server, which stops at the end of the run."""
    from tokengrove.rollout.episodes import Server

    options, settings = prepared.options, chosen.server
    if options.url is not None:
        if settings:
            raise ConfigurationError(
                f"the setting {next(iter(settings))} is for a server of the run's own: leave --url out"
            )
        yield Server(options.url, options.admin_key)
        return
    from tokengrove.rollout.own_server import own_server

    own_key = {} if options.admin_key is None else {"admin_key": options.admin_key}
    with ExitStack() as stack:
        folder = None if prepared.folder is None else prepared.folder.path
        server = stack.enter_context(own_server({**own_key, **settings}, folder, chosen.model))
        progress.say(f"the run's own server is {server.url}")
        yield server


class _Interruption:
    """Handles Ctrl-C and SIGTERM: the first stops the run cleanly, the second ends the process."""

    def __init__(self, progress: LiveProgress) -> None:
        self.came = False
        self._progress = progress
        self._stop: Stop | None = None
        self._task: asyncio.Task[Any] | None = None

    async def play(self, prepared: Prepared, server: Server) -> Played:
        from tokengrove.runs import play_prepared

        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._interrupt)
        try:
            return await play_prepared(prepared, server, observer=self._progress, on_start=self._started)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.default_int_handler)

    def _started(self, stop: Stop) -> None:
        self._stop = stop

    def _interrupt(self) -> None:
        if self.came:
            self._progress.stop()  # the progress bar hides the cursor
            os._exit(INTERRUPTED)  # the journal is on disk, and child processes end with their parent
        self.came = True
        if self._stop is not None:
            self._stop("interrupted")
            self._progress.say("once more ends it at once")
        elif self._task is not None:
            self._task.cancel()


def _tell_what_to_do(played: Played, options: RunOptions) -> None:
    """Print on stderr where all failures are recorded and how to resume the run."""
    summary = played.summary
    told = []
    if summary.failed and played.folder is not None:
        told.append(f"what every failed attempt said is in {played.folder / 'journal.jsonl'}")
    if not summary.complete and played.folder is not None:
        told.append("the same command plays the rest")
    if options.exports and summary.complete and not summary.exportable(options.export_failed):
        told.append("there are no samples, because no episode was played to its end")
    for line in told:
        print(line, file=sys.stderr)
