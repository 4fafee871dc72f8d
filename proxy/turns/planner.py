"""Plans replies: the prompt, the budget and the recording of a turn, on the route that serves it."""

from __future__ import annotations

import time
from functools import partial

from proxy.images.image_pool import ImagePool
from proxy.prompt_ids import PromptIds
from proxy.rendering.image_tokens import images_of
from proxy.rendering.token_bound import TooManyTokens
from proxy.resources.senders import Sender
from proxy.sessions.live_session import LiveSession
from proxy.settings import Settings
from proxy.trajectory.matching import Identity
from proxy.turns.budgets import (
    apply_budgets,
    check_images,
    context_of,
    limited,
    most_in_prompt,
    too_long,
    within_route,
)
from proxy.turns.defaults import best_effort, columns_of
from proxy.turns.history import with_messages
from proxy.turns.plan import ReplyPlan
from proxy.turns.prompts import Prompt
from proxy.turns.route import EngineRoute, ExternalRoute, Route
from proxy.turns.running import RunningTurns
from proxy.types import Ids, PlacedImage, PromptText, Sampler, SamplingParams, TurnRequest
from tokengrove.errors import ContextLengthExceeded, InvalidRequest
from tokengrove.options.model import RouteKind


class Planner:
    """Plans replies. `images`: the images of earlier turns. `running`: where requests wait for a paused engine."""

    def __init__(self, settings: Settings, images: ImagePool, running: RunningTurns) -> None:
        self._settings, self._images, self._running = settings, images, running

    async def of_engine(
        self,
        session: LiveSession,
        request: TurnRequest,
        identity: Identity,
        wanted: SamplingParams,
        route: EngineRoute,
    ) -> ReplyPlan:
        """Plan an engine's reply, with the messages that its prompt has. `wanted`: the sampling that was asked for.

        Raises InvalidRequest, LimitReached, and EngineUnavailable.
        """
        if route.gate.closed:
            await self._running.arrive(session, request.timeline, route.gate)
        info, record = route.gate.info(), session.record
        context = context_of(session, route.settings, info.context_length)
        try:
            prompt = await _prompt(session, request, identity, route, context, info.vocab_size)
        except ContextLengthExceeded:
            session.cache.recent.forget(request.messages)  # they may be megabytes
            raise
        if prompt.messages is not request.messages:
            request = with_messages(request, prompt.messages)
        route.prompts.check_vocabulary(prompt.ids, info.vocab_size, request)
        sampling = apply_budgets(wanted, request.n, session, prompt.ids.length, route.settings, context)
        if route.declared is not None:
            running = partial(self._running_on, session, route)
            sampling = within_route(sampling, request.n, session, route.declared, running)
        recording = route.kind is RouteKind.POLICY and bool(record.turn_options.get("replay"))
        if prompt.images:
            check_images(session, prompt.images, request.files, self._settings)
        return ReplyPlan(
            session=session,
            request=request,
            route=route,
            prompt=prompt,
            sampling=sampling,
            grammar=route.prompts.grammar(request),
            best_effort=() if wanted.seed is None else best_effort(wanted, info),
            pool=self._images,
            columns=columns_of(record, prompt, info) if recording else None,
            samplers=((0, Sampler("", info.dtype, info.quantization)),) if info.dtype else (),
        )

    def of_external(
        self,
        session: LiveSession,
        request: TurnRequest,
        identity: Identity,
        wanted: SamplingParams,
        route: ExternalRoute,
    ) -> ReplyPlan:
        """Plan the reply of an external model: its conversation is the prompt, which has no tokens.

        Raises InvalidRequest and LimitReached.
        """
        sampling = limited(wanted, request.n, session, route.settings)
        sampling = within_route(sampling, request.n, session, route.declared, partial(self._running_on, session, route))
        body = route.client.body(request, sampling)
        match = session.cache.find_parent(request, identity)
        request.timeline.matched = time.monotonic()
        images = tuple(PlacedImage.without_tokens(each) for each in images_of(match.new_messages(request.messages)))
        if images:
            check_images(session, images, request.files, self._settings)
        return ReplyPlan(
            session=session,
            request=request,
            route=route,
            prompt=Prompt(PromptIds(), match, request.messages, identity, bridged=False, images=images),
            sampling=sampling,
            grammar=None,
            best_effort=(),
            pool=self._images,
            body=body,
        )

    def _running_on(self, session: LiveSession, route: Route) -> int:
        """The number of turns of a session that run on a route."""
        return sum(turn.interaction.route == route.name for turn in self._running.of(session))


async def _prompt(
    session: LiveSession, request: TurnRequest, identity: Identity, route: EngineRoute, context: int, vocab_size: int
) -> Prompt:
    """Return the prompt of a turn, for a model with this context length and vocabulary.

    A history with a token outside of the vocabulary, from a broken engine or another model, is rendered again.
    """
    prompts, most = route.prompts, most_in_prompt(session, context)
    try:
        if request.input_ids is not None:
            if len(request.input_ids) > most:
                raise ContextLengthExceeded(prompt_tokens=len(request.input_ids), context_tokens=context)
            return await prompts.given(session, request, request.input_ids)
        prompt = await prompts.build(session, request, identity, most)
        if prompt.bridged and prompt.ids.largest >= vocab_size:
            return await prompts.anew(session, request, prompt, most)
        return prompt
    except TooManyTokens as found:
        raise too_long(found, context) from None


async def ids_of_text(session: LiveSession, text: PromptText, sender: Sender, route: EngineRoute) -> Ids:
    """Return the ids of a turn's text prompt. Raises InvalidRequest if there are none."""
    context = context_of(session, route.settings, route.gate.info().context_length)
    try:
        ids = await route.prompts.encode(text, most_in_prompt(session, context), sender)
    except TooManyTokens as found:
        raise too_long(found, context) from None
    if not ids:
        raise InvalidRequest("'prompt' is empty; it must have at least one token", param="prompt")
    return ids
