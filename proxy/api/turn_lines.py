"""The log line of a turn, written when both its request and the turn have ended: its fields, costs and result.

Each request of a turn has a line, including retries that attached to the turn or got its reply again. Each of `n`
choices has a line. If the client left, the turn continues for a while, and the line is written at its end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from proxy.telemetry import log
from proxy.telemetry.http_request import HttpRequest
from proxy.telemetry.log_lines import without_texts
from proxy.turns.choice import Choice
from proxy.turns.replay import ReplayedTurn
from proxy.turns.turn import Turn
from proxy.types import Interaction
from tokengrove.reasons import Status

logger = logging.getLogger(__name__)


class TurnLines:
    """Logs the choices of one reply at the end of its request. Create it before the reply joins their attempt.

    `content`: also log the messages and the answer, for `--log-content`.
    """

    def __init__(self, choices: Sequence[Choice], *, content: bool) -> None:
        self._choices, self._content = choices, content
        self._retry = None
        if isinstance(choices[0], ReplayedTurn):
            self._retry = "replayed"
        elif choices[0].attempt.joined:
            self._retry = "attached"

    def __call__(self, request: HttpRequest) -> None:
        for index, choice in enumerate(self._choices):
            if choice.ended.done():
                self._tell(request, index, choice)
            else:
                choice.ended.add_done_callback(lambda _, i=index, c=choice: self._tell(request, i, c))  # type: ignore[misc]

    def _tell(self, request: HttpRequest, index: int, choice: Choice) -> None:
        turn, new, ended = choice.interaction, self._retry is None, choice.ended
        error = turn.error
        if error is None and not ended.cancelled() and (problem := ended.exception()) is not None:
            error = str(problem)
        failed = turn.status is Status.FAILED or (error is not None and not request.left)
        level = logging.WARNING if failed else logging.INFO
        log.tell(
            logger,
            level,
            "turn",
            {
                "session": request.session,
                **({} if request.metadata is not None and not request.metadata else request.labels),
                "interaction": turn.id,
                "choice": index if len(self._choices) > 1 else None,
                "api": turn.api,
                "model": turn.model,
                "route": turn.route or None,
                "adapter": turn.adapter,
                "status": turn.status,
                "reason": turn.reason if turn.status is Status.COMPLETE else None,
                "retry": self._retry,
                "prompt_tokens": choice.prompt_tokens,
                "cached_tokens": turn.cached_tokens,
                "output_tokens": len(turn.output_ids),
                "finish": turn.finish_reason,
                "first_token_s": turn.first_token_at - request.began if new and turn.first_token_at else None,
                "total_s": time.monotonic() - request.started,
                "http_status": request.status,
                "client_left": request.left or None,
                "resubmitted": _submitted_again(choice) or None,
                "code": request.code,
                "error": None if error is None else without_texts(error),
                "request_id": request.id,
                "trace_id": None if request.trace is None else request.trace_id,
            },
        )
        if self._content and new:
            _tell_content(turn, request)


def _submitted_again(choice: Choice) -> int:
    """The number of times that a turn was resubmitted, after a pause or to another engine server."""
    if not isinstance(choice, Turn) or not choice.timeline.events:
        return 0
    return sum(event.name == "submitted_again" for event in choice.timeline.events)


def _tell_content(turn: Interaction, request: HttpRequest) -> None:
    asked = " | ".join(f"{message.role}: {message.content}" for message in turn.new_messages)
    logger.debug(
        "content",
        {
            "session": request.session,
            **request.labels,
            "interaction": turn.id,
            "messages": asked,
            "answer": turn.output.content,
            "reasoning": turn.output.reasoning,
        },
    )
