"""Conversion of text and conversations to token ids, and of token ids to text and messages, outside of turns.

Nothing is recorded.
"""

from __future__ import annotations

from proxy.engine.gate import Gate
from proxy.images.image_pool import ImagePool
from proxy.images.prompt_images import PromptImages
from proxy.prompt_ids import PromptIds
from proxy.resources.senders import Sender
from proxy.sessions.live_session import LiveSession
from proxy.settings import Settings
from proxy.turns.budgets import context_of, fits, most_counted
from proxy.turns.defaults import follow_session
from proxy.turns.history import identified, with_history
from proxy.turns.prompts import Prompts
from proxy.types import Continued, Ids, Message, Parsing, PromptText, TurnRequest
from tokengrove.errors import ContextLengthExceeded, InvalidRequest
from tokengrove.reasons import FinishReason


class Tokens:
    """Encodes, renders, parses and decodes within the vocabulary and the context of the engine's model."""

    def __init__(self, prompts: Prompts, gate: Gate, images: ImagePool, settings: Settings) -> None:
        self._prompts, self._gate, self._images, self._settings = prompts, gate, images, settings

    async def encode(self, text: PromptText, sender: Sender) -> Ids:
        """Return the ids of a text prompt. Raises ContextLengthExceeded above several times the context length."""
        context = self._context()
        with fits(context):
            return await self._prompts.encode(text, most_counted(context), sender)

    async def render(self, request: TurnRequest, sender: Sender, *, generation_prompt: bool) -> Ids:
        """Return the prompt of a conversation without a session. Raises like `prompt`."""
        context = self._context()
        with fits(context):
            return await self._prompts.render(request, most_counted(context), sender, generation_prompt)

    async def continued(
        self, request: TurnRequest, known: Continued, sender: Sender, *, generation_prompt: bool
    ) -> Ids:
        """Return the ids of `known`, followed by the ids of the messages after it; nothing is recorded.

        Raises InvalidRequest, and ContextLengthExceeded above several times the context length.
        """
        context = self._context()
        self._check_ids(known.ids, "continue_from.token_ids")
        if len(known.ids) > (most := most_counted(context)):
            raise ContextLengthExceeded(prompt_tokens=len(known.ids), context_tokens=context)
        with fits(context):
            return await self._prompts.continued(request, known, most, sender, generation_prompt)

    async def seen(self, request: TurnRequest, sender: Sender) -> tuple[Ids, PromptImages | None]:
        """Return the prompt of a request with token ids and no session: the ids with images expanded, and the images.

        Raises InvalidRequest if the ids do not have the tokens of the images.
        """
        assert request.input_ids is not None
        ids, placed = await self._prompts.located(request.input_ids, request.images, sender)
        return ids, PromptImages(placed, self._images, request.files) if placed else None

    async def parse(self, ids: Ids, wanted: Parsing, sender: Sender) -> tuple[Message, FinishReason]:
        """Return the message of an output outside of turns, and its finish reason. Raises InvalidRequest."""
        self._check_ids(ids, "tokens")
        if len(ids) > (most := self._context()):
            message = f"'tokens' holds {len(ids)} ids, but an output of the model has at most {most}"
            raise InvalidRequest(message, param="tokens")
        self._check_ids(wanted.prompt_ids or Ids("i"), "prompt_ids")
        return await self._prompts.parse(ids, wanted, sender)

    async def decode(self, ids: Ids, sender: Sender, *, special: bool = True) -> str:
        """Return the text of `ids`, with special tokens if `special`."""
        return await self._prompts.decode(ids, sender, special=special)

    async def prompt(self, session: LiveSession, request: TurnRequest, *, generation_prompt: bool = True) -> PromptIds:
        """Return the prompt that a turn would have; nothing is recorded.

        Raises InvalidRequest, and ContextLengthExceeded above several times the context length.
        """
        follow_session(request, session.record)
        request = with_history(session, request)
        identity = identified(session, request, keep=False)
        context = self._context(session)
        with fits(context):
            most = most_counted(context)
            return (await self._prompts.build(session, request, identity, most, generation_prompt)).ids

    def _context(self, session: LiveSession | None = None) -> int:
        return context_of(session, self._settings, self._gate.info().context_length)

    def _check_ids(self, ids: Ids, param: str) -> None:
        most = self._gate.info().vocab_size
        if max(ids, default=0) >= most:
            message = f"'{param}' has {max(ids)}, but the model's token ids end at {most - 1}"
            raise InvalidRequest(message, param=param)
