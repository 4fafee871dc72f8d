"""The turns of one reply before they start: the data that its choices share, and the data of choice `k`."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from proxy.engine.grammar import Grammar
from proxy.engine.requests import GenerateRequest
from proxy.images.image_pool import ImagePool, ReadImages
from proxy.images.prompt_images import PromptImages
from proxy.protocols.wire_protocol import new_hex
from proxy.rendering import OutputParser
from proxy.rendering.bridge import TAIL
from proxy.rendering.renderer import Renderer
from proxy.sessions.attempts import Attempt
from proxy.sessions.live_session import LiveSession
from proxy.side_columns.columns import ColumnRequest
from proxy.trajectory.matching import hash_of_chain, messages_hash
from proxy.turns.choice import ChoiceOrder
from proxy.turns.column_log import ColumnLog
from proxy.turns.defaults import sampling_of_choice, stop_tokens
from proxy.turns.given_answer import GivenAnswer
from proxy.turns.logprob_report import new_report
from proxy.turns.prompts import Prompt
from proxy.turns.reply_options import reply_options_of
from proxy.turns.route import EngineRoute, ExternalRoute, Route
from proxy.turns.turn import Turn
from proxy.types import Api, Ids, Interaction, Logprobs, Message, Role, Sampler, SamplingParams, TurnRequest
from proxy.upstream.client import UpstreamClient
from tokengrove.options.model import RouteKind
from tokengrove.options.start import Replay
from tokengrove.reasons import FinishReason, Reason, Status

_NO_ANSWER = Message(Role.ASSISTANT)


@dataclass(slots=True, kw_only=True)
class ReplyPlan:
    """The data that the `n` choices of one reply share. `sampling` includes the session's defaults and the budgets.

    `attempt`, `reply_id`: set before the turns start. `pool`: the images of the prompt that did not come with the
    request. `columns`: the side columns to record. `adapter`: the version of the adapter that samples;
    None: the base model, or another server. `body`: of the request to an external model. `samplers`: those of the
    output, unless its tokens say more.
    """

    session: LiveSession
    request: TurnRequest
    route: Route
    prompt: Prompt
    sampling: SamplingParams
    grammar: Grammar | None
    best_effort: tuple[str, ...]
    pool: ImagePool
    adapter: int | None = None
    attempt: Attempt = field(init=False)
    reply_id: str = ""
    columns: ColumnRequest | None = None
    body: dict[str, Any] = field(default_factory=dict)
    samplers: tuple[tuple[int, Sampler], ...] = ()

    def release(self) -> None:
        """Stop counting the reply among the requests of its adapter: all its choices have ended, or none has begun."""
        if isinstance(self.route, EngineRoute):
            self.route.adapters.end(self.adapter)


def make_turns(plan: ReplyPlan) -> list[Turn]:
    """Return one turn per choice, not yet started."""
    if plan.sampling.seed is not None and "seed" not in plan.request.given:
        # Vary the session's seed, or equal prompts would get equal answers.
        plan.sampling = sampling_of_choice(plan.sampling, plan.session.turns_taken)
    number = plan.request.n
    if number == 1:
        return [_make_turn(plan, 0, None)]
    order = ChoiceOrder(number)
    return [_make_turn(plan, k, order) for k in range(number)]


def _make_turn(plan: ReplyPlan, k: int, order: ChoiceOrder | None) -> Turn:
    if isinstance(plan.route, ExternalRoute):
        return _external_turn(plan, plan.route)
    gate, renderer = plan.route.gate, plan.route.renderer
    request, prompt, sampling = plan.request, plan.prompt, plan.sampling
    if k:
        sampling = sampling_of_choice(sampling, k)
    alternatives = 0 if plan.columns is None else _alternatives(plan)
    plain_end = request.sampling.stop_token_ids is None and not request.sampling.ignore_eos
    interaction = _begin(plan, plan.reply_id if k == 0 else f"{plan.reply_id}.{k}", sampling)
    generate = GenerateRequest(
        request_id=interaction.id,
        prompt=prompt.ids,
        sampling=sampling,
        stop_token_ids=renderer.stop_token_ids if plain_end else stop_tokens(request, renderer.stop_token_ids),
        grammar=plan.grammar,
        top_logprobs=max(request.top_logprobs, alternatives),
        session_id=plan.session.id,
        group_id=plan.session.record.group_id or "",
        turn=request,
        turn_number=plan.session.turns_taken + k,
        timeline=request.timeline if k == 0 else copy(request.timeline),
        images=PromptImages(prompt.images, plan.pool, request.files) if prompt.images else None,
        columns=plan.columns,
        adapter=plan.adapter,
    )
    make_id = new_call_id if request.api is not Api.MESSAGES else new_tool_use_id
    parser = new_parser(renderer, request, sampling, prompt.ids.tail(TAIL), make_id)
    return Turn(
        interaction=interaction,
        request=request,
        session=plan.session,
        attempt=plan.attempt,
        index=k,
        order=order,
        prompt=prompt,
        sample=lambda turn: gate.sample(turn.generate, turn.take),
        generate=generate,
        columns=None if plan.columns is None else ColumnLog(plan.columns, alternatives),
        parser=parser,
        report=new_report(request, generate.stop_token_ids, renderer.piece) if request.logprobs else None,
        encode=renderer.encode,
        raw_text=renderer.raw_text,
    )


def _external_turn(plan: ReplyPlan, route: ExternalRoute) -> Turn:
    """The turn of an external model, whose answers have no choices and no tokens."""
    interaction = _begin(plan, plan.reply_id, plan.sampling)
    interaction.trainable = interaction.has_logprobs = False
    timeline, answer = plan.request.timeline, GivenAnswer(plan.request.prefill)
    return Turn(
        interaction=interaction,
        request=plan.request,
        session=plan.session,
        attempt=plan.attempt,
        prompt=plan.prompt,
        sample=partial(_ask, route.client, plan.body, answer, plan.pool.get),
        generate=GenerateRequest(interaction.id, plan.prompt.ids, plan.sampling, timeline=timeline),
        parser=answer,
        report=None,
        encode=lambda text: Ids("i"),
        raw_text=lambda ids: "",
    )


async def _ask(
    client: UpstreamClient, body: dict[str, Any], answer: GivenAnswer, read_images: ReadImages, turn: Turn
) -> FinishReason:
    """Ask an external model, publish its answer as it comes, and note what it told of itself. Raises UpstreamFailed."""
    told = await client.answer(body, turn.request.files, turn.receive, read_images)
    answer.stop_string = told.stop_string
    answer.reasoning_tokens = told.usage.reasoning_tokens or 0
    counts = {name: count for name, count in told.usage._asdict().items() if count is not None}
    turn.interaction.external = {"model": told.model, **counts}
    return told.finish


def _alternatives(plan: ReplyPlan) -> int:
    """How many alternatives of each token the turns of a reply record."""
    if plan.columns is None or Replay.TOP_LOGPROBS not in plan.columns.replay:
        return 0
    alternatives: int = plan.session.record.turn_options["alternatives"]
    return alternatives


def new_parser(
    renderer: Renderer, request: TurnRequest, sampling: SamplingParams, prompt_ids: Ids, call_id: Callable[[], str]
) -> OutputParser:
    """Return the parser of a choice. `prompt_ids`: the end of the prompt. `call_id` returns a new tool call id."""
    if request.api is Api.COMPLETIONS:
        parser = renderer.plain_parser(sampling.stop)
    else:
        if request.tool_parser is not None:
            renderer = renderer.reading(request.tool_parser)
        parser = renderer.parser(
            request.tools, request.tool_choice, prompt_ids, sampling.stop, call_id, request.prefill
        )
    parser.stop_after = sampling.min_tokens
    if sampling.include_stop_str_in_output:
        parser.keep_stop_string()
    return parser


def _begin(plan: ReplyPlan, interaction_id: str, sampling: SamplingParams) -> Interaction:
    """Return the interaction of a turn before sampling. Its tokens and its place in the tree are set at the end."""
    request, match = plan.request, plan.prompt.match
    parent, new_messages = match.parent, request.messages
    if match.covered:
        new_messages = match.new_messages(new_messages)
    return Interaction(
        id=interaction_id,
        session_id=plan.session.id,
        parent_id=parent.interaction.id if parent is not None else None,
        aligned=False,
        reason=Reason.NEW_ROOT,
        api=request.api,
        status=Status.BEGUN,
        new_messages=new_messages,
        output=_NO_ANSWER,
        prefix_length=0,
        prompt_suffix=Ids("i"),
        output_ids=Ids("i"),
        logprobs=Logprobs("f"),
        versions=(),
        finish_reason=None,
        sampling=sampling,
        tools=request.tools if parent is None else (),
        template_options=request.template_options if parent is None else {},
        model=request.model,
        route=request.route,
        adapter=plan.adapter,
        route_kind=RouteKind.EXTERNAL if isinstance(plan.route, ExternalRoute) else plan.route.kind,
        state_hash=request.state_hash or _state_hash(plan, new_messages),
        purpose=request.purpose,
        agent=request.agent,
        request_hash=plan.attempt.key,
        dropped=request.dropped,
        echo=plan.prompt.echo,
        idempotency_key=request.idempotency_key,
        request_id=request.request_id,
        grammar=plan.grammar is not None,
        asked=reply_options_of(request),
        best_effort=plan.best_effort,
        samplers=plan.samplers,
        thread=request.thread if parent is None else None,
        prefill=0 if request.prefill is None else len(request.prefill.content),
        created_at=time.time(),
    )


def _state_hash(plan: ReplyPlan, new_messages: tuple[Message, ...]) -> str:
    identity = plan.prompt.identity
    if plan.prompt.match.parent is None and not identity.lead and not plan.request.route:
        return hash_of_chain(identity.states[-1])  # it is over the same messages
    return messages_hash(new_messages)


def new_tool_use_id() -> str:
    """Return a new id for a tool call in Anthropic's style."""
    return "toolu_" + new_hex()[:24]


def new_call_id() -> str:
    """Return a new id for a tool call in OpenAI's style."""
    return "call_" + new_hex()[:24]
