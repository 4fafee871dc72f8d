"""`tokengrove score`: scores sessions of a running server, once or as they go on."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokengrove.commands.export_flags import export_body, takes_session_flags
from tokengrove.commands.failure import fail, fail_as
from tokengrove.commands.shown_session import print_json
from tokengrove.errors import ConfigurationError, InvalidRequest, ProxyError

if TYPE_CHECKING:
    from tokengrove.rollout.scorers import Scored, Scorer

_INTERRUPTED = 130

Scorers = Annotated[
    list[str],
    typer.Argument(metavar="SCORER...", help="Class paths of scorers (package.module:name).", show_default=False),
]
Url = Annotated[str, typer.Option(help="URL of the running server.")]
Key = Annotated[str | None, typer.Option(envvar="TOKENGROVE_ADMIN_KEY", help="Admin key of the server, if it has one.")]
Follow = Annotated[bool, typer.Option("--follow", help="Go on: score turns and sessions as they come, until Ctrl-C.")]
Again = Annotated[bool, typer.Option("--again", help="Score also what has the scorer's reward already.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Sessions at once.")]
Timeout = Annotated[float, typer.Option(help="Seconds that a call may take, unless the scorer has its own limit.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a line of JSON for each session.")]


@takes_session_flags
def score(
    scorers: Scorers,
    url: Url = "http://127.0.0.1:8080",
    admin_key: Key = None,
    follow: Follow = False,
    again: Again = False,
    concurrency: Concurrency = 16,
    timeout_s: Timeout = 600.0,
    as_json: AsJson = False,
    **flags: Any,
) -> None:
    """Score sessions of a server, and record the scores as named rewards. Without flags: all ended sessions.

    With --follow: live sessions, and those that ended in the last 24 hours; a call that failed is repeated. Without it,
    the exit code is 1 if a call failed.

    tokengrove score my_rewards:politeness --group math

    tokengrove score my_rewards:thanked --follow
    """
    if follow and again:
        raise ConfigurationError("--again would score the same turns for ever with --follow; leave one out")
    sys.path.insert(0, os.getcwd())  # so that functions of the user can be imported, as with `python -m`
    chosen = _loaded(scorers)
    scoring = _Scoring(chosen, url, admin_key, export_body(flags).get("filter"), concurrency, timeout_s, as_json)
    try:
        failed = asyncio.run(scoring.follow() if follow else scoring.once(again=again))
    except ProxyError as error:
        fail_as(error, url)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    if failed:
        sys.exit(1)


def _loaded(paths: list[str]) -> list[Scorer]:
    from tokengrove.rollout.scorers.sessions import loaded

    try:
        return loaded(paths)
    except InvalidRequest as error:
        fail(error.message)
    except ImportError as error:
        fail(str(error))


class _Scoring:
    """The arguments of the command."""

    def __init__(
        self,
        scorers: list[Scorer],
        url: str,
        admin_key: str | None,
        filter: Any,
        concurrency: int,
        timeout_s: float,
        as_json: bool,
    ) -> None:
        self._scorers, self._url, self._admin_key, self._filter = scorers, url, admin_key, filter
        self._concurrency, self._timeout_s, self._as_json = concurrency, timeout_s, as_json

    async def once(self, *, again: bool) -> int:
        """Return the number of failures."""
        from tokengrove.client import AsyncClient
        from tokengrove.rollout.scorers import score_sessions

        async with AsyncClient(self._url, self._admin_key, retry_s=0.0) as client:
            found = await score_sessions(
                *(client, self._filter, self._scorers),
                concurrency=self._concurrency,
                timeout_s=self._timeout_s,
                again=again,
            )
        for each in found:
            self._print(each)
        failures = sum(len(each.failures) for each in found)
        if not self._as_json:
            print(f"{len(found)} sessions, {sum(bool(each.scores) for each in found)} scored, {failures} calls failed")
        return failures

    async def follow(self) -> int:
        """Never returns."""
        from tokengrove.client import AsyncClient
        from tokengrove.rollout.scorers import score_live

        async with AsyncClient(self._url, self._admin_key, retry_s=0.0) as client:
            limits: Any = {"concurrency": self._concurrency, "timeout_s": self._timeout_s}
            async with aclosing(score_live(client, self._scorers, self._filter, **limits)) as scores:
                async for each in scores:
                    self._print(each)
        return 0

    def _print(self, scored: Scored) -> None:
        """Print a session; failures on stderr, one line for each."""
        if self._as_json:
            failures = [str(each) for each in scored.failures]
            print_json({"session_id": scored.session_id, "scores": dict(scored.scores), "failures": failures})
            sys.stdout.flush()
            return
        if scored.scores:
            values = ", ".join(f"{name} {value:g}" for name, value in scored.scores.items())
            print(f"{scored.session_id}: {values}", flush=True)
        for failure in scored.failures:
            print(f"tokengrove: {scored.session_id}: {failure}", file=sys.stderr, flush=True)
