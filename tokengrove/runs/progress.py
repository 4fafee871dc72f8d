"""The progress of a run: a live display on a terminal, or a line at intervals elsewhere.

A separate thread draws it, from numbers that the run counts anyway, so no episode ever waits for it.
"""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult
from tokengrove.runs.observer import Observer
from tokengrove.runs.report import Fact, bar, facts, flowed
from tokengrove.runs.summary import Summary

TOLD_EVERY_S = 30.0
_DRAWN_PER_S = 4.0


class LiveProgress(Observer):
    """Shows a run on `console` (default: stderr) while its `with` block runs.

    A terminal shows a bar and the current numbers, which vanish at the end. Any other output, such as the log of a CI
    job, gets a line every `every_s` seconds. With `quiet`, nothing is shown.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False, every_s: float = TOLD_EVERY_S) -> None:
        self._console = console or Console(stderr=True)
        self._quiet, self._every_s = quiet, every_s
        self._summary: Summary | None = None
        self._running: set[str] = set()
        self._now = "starting"
        self._live: Live | None = None
        self._over = threading.Event()
        self._telling: threading.Thread | None = None

    def __enter__(self) -> Self:
        if not self._quiet and self._console.is_terminal:
            self._live = Live(
                self,
                console=self._console,
                refresh_per_second=_DRAWN_PER_S,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),  # agents' output goes above the bar, but stays in a pipe
            )
            self._live.start()
        elif not self._quiet:
            self._telling = threading.Thread(target=self._tell, name="tokengrove-progress", daemon=True)
            self._telling.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._telling is not None:
            self._telling.join()

    def stop(self) -> None:
        """Stop the display and restore the terminal."""
        self._over.set()
        if self._live is not None:
            self._live.stop()

    def planned(self, episodes: int, done: int, summary: Summary) -> None:
        self._summary, self._now = summary, ""
        if done:
            self.say(f"{done} of {episodes} episodes were played before")

    def started(self, plan: EpisodePlan) -> None:
        self._running.add(plan.session_id)

    def retried(self, result: EpisodeResult) -> None:
        self._running.discard(result.session_id)

    def finished(self, result: EpisodeResult) -> None:
        self._running.discard(result.session_id)

    def stopping(self, why: str) -> None:
        self._now = "stopping"
        self.say(f"stopping: {why}")

    def exporting(self, target: str) -> None:
        self._now = f"writing {target}"

    def say(self, text: str) -> None:
        """Print a permanent line."""
        if not self._quiet:
            self._console.print(Text(text), soft_wrap=True)

    def facts(self) -> list[Fact]:
        """The current facts of the run."""
        told = [] if self._summary is None else facts(self._summary, len(self._running))
        return [*told, Fact(self._now, "bold")] if self._now else told

    def line(self) -> str:
        """The current facts in one line."""
        return ", ".join(fact.text for fact in self.facts())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        summary = self._summary
        if summary is not None and summary.episodes:
            yield bar(summary.ended / summary.episodes, options.max_width)
        yield from flowed(self.facts(), options.max_width)

    def _tell(self) -> None:
        while not self._over.wait(self._every_s):
            self.say(self.line())
