"""Token ids of loops of verl 0.9, kept over the server: sampled ids are never rendered again.

Images are sent to the server as they are, or as PNG. The server's processor determines their tokens.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokengrove.client.image_urls import ImageUrls, images_of
from tokengrove.errors import InvalidRequest, UnsupportedParameter

Messages = Sequence[Mapping[str, Any]]
Merged = tuple["MergeResult", list[int], list[float] | None]
"""All ids, their mask and their logprobs."""


@dataclass(frozen=True, slots=True)
class MergeResult:
    """All ids after a merge. `appended_token_count` of them are new; no ids are inserted or removed here."""

    token_ids: list[int]
    appended_token_count: int
    kind: Literal["assistant", "context"] = "context"
    inserted_token_ids: list[int] = field(default_factory=list)
    removed_prefix_token_count: int = 0


class ContinuousTokens(ABC):
    """Base class of AgentLoopBase. Images are rejected by servers of text models; videos and audio are rejected here.

    Images are parts of the messages, as in verl's datasets and tools: of type `image` or `image_url`.
    """

    server_manager: Any
    apply_chat_template_kwargs: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    image_urls: ImageUrls

    @abstractmethod
    async def build_prompt(self, messages: Messages, tools: Sequence[Any] = ()) -> list[int]:
        """The ids of the first prompt."""

    async def with_urls(self, messages: Messages, images: Any = None) -> list[dict[str, Any]]:
        """Copies of the messages in the format of chat completions, with images as URLs.

        `images`: the images of parts of type `image` that contain none. Raises InvalidRequest if their numbers differ,
        and for an image of an unknown type.
        """
        given = [] if images is None else list(images) if isinstance(images, list | tuple) else [images]
        if not given and not images_of(messages):
            return [dict(message) for message in messages]
        return await asyncio.to_thread(self.image_urls.messages, messages, given)

    async def ct_build_initial_tokens(
        self,
        messages: Messages,
        tools: Sequence[Any] | None = None,
        images: Any = None,
        videos: Any = None,
        audios: Any = None,
        mm_inputs_out: Any = None,
    ) -> list[int]:
        """`build_prompt` with the `images` of `with_urls`. `mm_inputs_out` is not changed."""
        _refuse(videos=videos, audios=audios)
        return await self.build_prompt(await self.with_urls(messages, images), tools or ())

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: list[float] | None = None,
    ) -> Merged:
        """Append the ids of an answer: mask 1, with their logprobs.

        Raises InvalidRequest if logprobs are kept and the answer does not have one for each id.
        """
        count = len(assistant_token_ids)
        if response_logprobs is not None and len(assistant_logprobs or ()) != count:
            message = f"'assistant_logprobs' has {len(assistant_logprobs or ())} values for {count} sampled ids"
            raise InvalidRequest(message, param="assistant_logprobs")
        if response_logprobs is None and assistant_logprobs is not None:
            raise InvalidRequest("'assistant_logprobs' needs 'response_logprobs'", param="response_logprobs")
        merged = MergeResult([*runtime_token_ids, *assistant_token_ids], count, "assistant")
        logprobs = None if response_logprobs is None else [*response_logprobs, *(assistant_logprobs or ())]
        return merged, [*response_mask, *[1] * count], logprobs

    async def ct_merge_context_msg(
        self,
        previous_messages: Messages,
        updated_messages: Messages,
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: Sequence[Any] | None = None,
    ) -> Merged:
        """Append the ids that the chat template adds for the messages after `previous_messages`, which end with the
        model's answer: mask 0, logprob 0. Tool calls and results may have no ids.

        Raises InvalidRequest if the messages, or the template's output, are changed other than by appending.
        """
        if list(updated_messages[: len(previous_messages)]) != list(previous_messages):
            message = "'updated_messages' must begin with 'previous_messages': messages may only be appended"
            raise InvalidRequest(message, param="updated_messages")
        sampled = next((at for at, bit in enumerate(reversed(response_mask)) if not bit), len(response_mask))
        known = {"messages": len(previous_messages), "token_ids": runtime_token_ids, "output_tokens": sampled}
        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        if self.apply_chat_template_kwargs:
            options["chat_template_kwargs"] = self.apply_chat_template_kwargs
        shown = as_requested(await self.with_urls(updated_messages))
        ids = await self.server_manager.tokenize(shown, continue_from=known, **options)
        count = len(ids) - len(runtime_token_ids)
        logprobs = None if response_logprobs is None else [*response_logprobs, *[0.0] * count]
        return MergeResult(ids, count), [*response_mask, *[0] * count], logprobs

    async def process_multi_modal_info(self, messages: Messages) -> dict[str, Any]:
        """The images of the messages as `images`, in the form that the messages have them; {} without images.

        The images are not resized: the server's processor does that. Raises UnsupportedParameter for videos and audio.
        """
        for message in messages:
            content = message.get("content")
            parts = content if isinstance(content, list | tuple) else ()
            kinds = {part.get("type") for part in parts if isinstance(part, Mapping)}
            _refuse(videos="video" in kinds, audios="audio" in kinds)
        images = [image for image in images_of(messages) if image is not None]
        return {"images": images} if images else {}

    async def process_vision_info(self, messages: Messages) -> dict[str, Any]:
        """`process_multi_modal_info` under its earlier name."""
        return await self.process_multi_modal_info(messages)

    def media_options(self, images: Any) -> dict[str, Any]:
        """The arguments of `server_manager.generate` for the images of the prompt; {} without images."""
        if not images:
            return {}
        return {"image_data": images, "mm_processor_kwargs": self._get_mm_processor_kwargs()}

    @staticmethod
    def build_sglang_video_payload(videos: Any, mm_inputs: Mapping[str, Any]) -> None:
        """None if there are no videos. Raises UnsupportedParameter for videos."""
        _refuse(videos=videos)

    @staticmethod
    def _assert_mm_supported(has_multi_modal: bool) -> None:
        """Do nothing: the server rejects images if its model is not a vision model."""
        del has_multi_modal

    def _get_mm_processor_kwargs(self, audio_data: Any = None) -> dict[str, Any]:
        return dict(self.mm_processor_kwargs)


def _refuse(**media: Any) -> None:
    """Raise UnsupportedParameter for media that no model of a server reads; it names the argument."""
    for name, given in media.items():
        if given:
            raise UnsupportedParameter(
                f"{name} are not supported: the server's models read texts and images", param=name
            )


def as_requested(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages with ids for calls and results without one, in order, and arguments as JSON text."""
    made: list[dict[str, Any]] = []
    waiting: list[str] = []
    for at, message in enumerate(messages):
        copied = dict(message)
        if calls := message.get("tool_calls"):
            copied["tool_calls"] = [_call(call, f"call_{at}_{index}") for index, call in enumerate(calls)]
            waiting = [call["id"] for call in copied["tool_calls"]]
        if message.get("role") == "tool":
            following = waiting.pop(0) if waiting else f"call_{at}"
            copied["tool_call_id"] = message.get("tool_call_id") or following
        made.append(copied)
    return made


def _call(call: Mapping[str, Any], given: str) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "id": call.get("id") or given, "type": "function", "function": function}
