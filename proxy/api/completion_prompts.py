"""What `/v1/completions` does before its turns begin: several prompts in one request, and logprobs of prompts.

A prompt is scored for its reply only. The scores are not recorded, and a retry of the request scores it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from starlette.types import Receive

from proxy.api.prompt_scores import score_all
from proxy.protocols.completions.protocol import prompt_fields
from proxy.protocols.completions.reply import ECHO, prompt_logprobs_json
from proxy.sessions.live_session import LiveSession
from proxy.telemetry.timeline import Timeline
from proxy.turns.defaults import follow_session, with_defaults
from proxy.turns.logprob_report import LogprobReport
from proxy.turns.planner import ids_of_text
from proxy.turns.route import EngineRoute
from proxy.turns.scores import Scored, check_scores
from proxy.turns.turns import Turns
from proxy.types import Ids, TurnRequest


def each_prompt(asked: TurnRequest) -> list[TurnRequest]:
    """Return a request for each prompt of a request. Each repeats under an Idempotency-Key of its own."""
    key, echo, received = asked.idempotency_key, ECHO in asked.echo, asked.timeline
    others = [
        replace(
            asked,
            **prompt_fields(prompt, echo=echo),
            further_prompts=(),
            prompt_number=number,
            idempotency_key=None if key is None else f"{key}:{number}",
            timeline=Timeline(received=received.received, read=received.read),
        )
        for number, prompt in enumerate(asked.further_prompts, 1)
    ]
    return [asked, *others]


async def score_prompts(receive: Receive, turns: Turns, session: LiveSession, parts: Sequence[TurnRequest]) -> None:
    """Set `prompt_logprobs` of requests that differ in their prompts only.

    Prompts are scored at the temperature of the turns, and at 1 if that is 0. Raises the errors of `check_scores` and
    `score_all`, SessionClosed, NotFound for an adapter version that is not live, and InvalidRequest for an empty text.
    """
    session.check_open()
    first = parts[0]
    route = turns.routes.engine(first.route)
    follow_session(first, session.record)
    temperature = with_defaults(first, session.record.sampling).temperature or 1.0
    check_scores(route.gate.info(), temperature)
    prompts = [await _ids(session, asked, route) for asked in parts]
    wanted = [Scored(ids, 1, session_id=session.id) for ids in prompts if len(ids) > 1]
    adapter = route.begin(session, first.pinned)
    try:
        scores = iter(
            await score_all(receive, turns, route, adapter, wanted, temperature, first.top_logprobs, first.sender)
        )
    finally:
        route.adapters.end(adapter)
    for asked, ids in zip(parts, prompts, strict=True):
        report = LogprobReport(route.renderer.piece, (), asked.names_ids)
        report.add(ids[0], 0.0)  # nothing is before it: it has no logprob
        if len(ids) > 1:
            found = next(scores)
            tops = found.tops or ((),) * len(found.logprobs)
            for token, logprob, top in zip(ids[1:], found.logprobs, tops, strict=True):
                report.add(token, logprob, top)
        asked.prompt_logprobs = prompt_logprobs_json(report.entries)


async def _ids(session: LiveSession, asked: TurnRequest, route: EngineRoute) -> Ids:
    """The ids of a prompt, which the turn then begins with."""
    if asked.text is not None:
        asked.input_ids = await ids_of_text(session, asked.text, asked.sender, route)
        asked.text = None
    assert asked.input_ids is not None
    return asked.input_ids
