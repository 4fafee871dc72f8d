"""verl's server manager over `/v1/generate`: token ids in, token ids out.

A manager of a session has only the agent's key, and every call is a recorded turn of the session. A manager of servers
records nothing. It sends all calls of a `request_id` to the same server, and a new `request_id` to the server with the
fewest running calls.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np

from tokengrove.client import AsyncClient, AsyncSession
from tokengrove.client.image_urls import ImageUrls
from tokengrove.client.options import GenerateOptions
from tokengrove.errors import InvalidRequest, UnsupportedParameter
from tokengrove.verl.outputs import TokenOutput
from tokengrove.verl.settings import trainer_config
from tokengrove.verl.tracing import rollout_trace_op, traceparent

Handle: TypeAlias = str | AsyncClient | AsyncSession
"""The address of a server, a client of a server, or a session."""

# Fields of engine APIs that have no effect where no text is decoded.
_OF_TEXT = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "detokenize", "no_stop_trim"})
_LIMITS = ("max_new_tokens", "max_tokens")
_KNOWN = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("max_completion_tokens", "min_tokens", "min_new_tokens", "stop", "stop_token_ids", "ignore_eos"),
        *("seed", "sampling_seed", "logit_bias", "n", *_LIMITS),
    }
)


class PromptTooLong(InvalidRequest, ValueError):
    """The prompt leaves no room for a response. It is also a ValueError, which verl's servers raise."""

    code = "context_length_exceeded"


class Placement:
    """Chooses one of several servers for a request: the server that had its key before, else the least loaded one.

    The last `max_cache_size` keys are remembered. `by_hash`: the key alone decides, in the same way in every process.
    """

    def __init__(self, servers: int, max_cache_size: int, *, by_hash: bool = False) -> None:
        self._running = Counter(dict.fromkeys(range(servers), 0))
        self._placed: OrderedDict[str, int] = OrderedDict()
        self._size, self._by_hash = max_cache_size, by_hash

    def choose(self, key: str) -> int:
        """The index of the server for `key`."""
        if self._by_hash:
            return int.from_bytes(blake2b(key.encode(), digest_size=8).digest()) % len(self._running)
        server = self._placed.pop(key, None)
        if server is None:
            server = min(self._running, key=self._running.__getitem__)
        self._placed[key] = server
        if len(self._placed) > self._size:
            self._placed.popitem(last=False)
        return server

    @contextmanager
    def counted(self, server: int) -> Iterator[None]:
        """Count a request as running on a server during the block."""
        self._running[server] += 1
        try:
            yield
        finally:
            self._running[server] -= 1

    @asynccontextmanager
    async def running(self, key: str) -> AsyncIterator[int]:
        """Count a request of `key` as running during the block, which receives the index of its server."""
        server = self.choose(key)
        with self.counted(server):
            yield server


class AsyncLLMServerManager:
    """Samples from token ids. `server_handles`: one or more addresses or clients of servers, or one session.

    `config` provides the default of `max_tokens`; without it only the server's own limits apply. `admin_key` is used
    for addresses. Clients that the manager created from addresses are closed by `close`, or at the end of an `async
    with` block. A manager of addresses only can be pickled, with its admin key, for workers of Ray.
    `answers`: the outputs sampled in its session, in order. `image_urls` contains the images that were sent.

    A subclass may override `_choose_server`, as in verl. If such a manager is passed to AgentLoopWorker, it also
    chooses the servers of the sessions.
    """

    def __init__(
        self,
        config: object = None,
        server_handles: Handle | Sequence[Handle] = (),
        max_cache_size: int = 10000,
        *,
        admin_key: str | None = None,
    ) -> None:
        handles = [server_handles] if isinstance(server_handles, str) else server_handles
        handles = list(handles) if isinstance(handles, Sequence) else [handles]
        if not handles:
            raise InvalidRequest("give at least one address or client of a server", param="server_handles")
        if any(isinstance(handle, AsyncSession) for handle in handles) and len(handles) > 1:
            raise InvalidRequest("a session is on one server: give it alone", param="server_handles")
        self.config = None if config is None else trainer_config(config)
        self._admin_key, self._max_cache_size = admin_key, max_cache_size
        self._own = [AsyncClient(each, admin_key) for each in handles if isinstance(each, str)]
        made = iter(self._own)
        self.server_handles: list[AsyncClient | AsyncSession] = [
            next(made) if isinstance(each, str) else _checked(each) for each in handles
        ]
        by_hash = self.config is not None and self.config.actor_rollout_ref.rollout.full_determinism
        self._placement = Placement(len(handles), max_cache_size, by_hash=by_hash)
        self.answers: list[TokenOutput] = []
        self.image_urls = ImageUrls()
        self._end_token_ids: list[int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the addresses. Raises InvalidRequest if the manager was given clients or a session."""
        if len(self._own) < len(self.server_handles):
            message = "a server manager of clients or a session cannot be pickled: create it from addresses"
            raise InvalidRequest(message, param="server_handles")
        given = (self.config, [client.url for client in self._own], self._max_cache_size)
        return partial(type(self), admin_key=self._admin_key), given

    async def __aenter__(self) -> AsyncLLMServerManager:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the clients that were created from addresses."""
        for client in self._own:
            await client.aclose()

    @rollout_trace_op
    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: object = None,
        video_data: object = None,
        audio_data: object = None,
        mm_processor_output: object = None,
        mm_processor_kwargs: object = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Sample one continuation of `prompt_ids`. Cancelling the call stops the engine.

        `sampling_params` has the names of verl, vLLM or SGLang; a value of None means the default. The default limit of
        tokens is `response_length`, or what the prompt leaves of `prompt_length + response_length` if that is less.
        `max_model_len` limits every request. `stop_token_ids` end an answer in addition to the model's own end tokens,
        as in verl. `logprobs` false: no logprobs are returned (they are still recorded). `image_data`: all images of
        the prompt, in the order of their tokens, in any form that `image_url` accepts. `priority` has no effect: the
        server lets sessions take turns.

        Raises PromptTooLong, UnsupportedParameter for other media, for `mm_processor_kwargs` with images and for
        `prompt_logprobs`, InvalidRequest for an unknown parameter, and the errors of the server, which rejects images
        if its model is not a vision model.
        """
        media = {"video_data": video_data, "audio_data": audio_data, "mm_processor_output": mm_processor_output}
        for name, value in media.items():
            if _is_given(value):
                message = f"'{name}' is not supported: the server's models read texts and images"
                raise UnsupportedParameter(message, param=name)
        options: GenerateOptions = {"request_id": request_id}
        if (parent := traceparent()) is not None:
            options["traceparent"] = parent
        if _is_given(image_data):
            if mm_processor_kwargs:
                message = "'mm_processor_kwargs' is not supported: the server's model folder configures the processor"
                raise UnsupportedParameter(message, param="mm_processor_kwargs")
            options["image_data"] = await asyncio.to_thread(self.image_urls.urls, image_data)
        ids = [int(each) for each in prompt_ids]
        params, wants_logprobs = self._sampling(sampling_params, len(ids))
        server = self.server_of(request_id)
        with self._placement.counted(server):
            handle = self.server_handles[server]
            if "stop_token_ids" in params:  # on the server they replace the model's end tokens
                params["stop_token_ids"] = [*params["stop_token_ids"], *await self._end_tokens(handle)]
            options["sampling_params"] = params
            done = await handle.generate(ids, **options)
        output = TokenOutput(
            done.output_ids,
            None if done.logprobs is None or not wants_logprobs else list(done.logprobs),
            finish_reason=done.finish_reason,
            versions=done.versions,
            interaction_id=done.id,
            extra_fields={"num_cached_tokens": done.cached_tokens, "logprobs_of": done.logprobs_of},
        )
        if isinstance(handle, AsyncSession):
            self.answers.append(output)
        return output

    def _choose_server(self, request_id: str) -> AsyncClient | AsyncSession:
        """The element of `server_handles` that samples for a request."""
        return self.server_handles[self._placement.choose(request_id)]

    def server_of(self, request_id: str) -> int:
        """The index of the server that `_choose_server` returns. Raises InvalidRequest for a server not in the list."""
        chosen = self._choose_server(request_id)
        found = next((at for at, handle in enumerate(self.server_handles) if handle is chosen), None)
        if found is None:
            raise InvalidRequest(
                f"_choose_server of {type(self).__name__} returned {chosen!r:.80}, which is not in its server_handles",
                param="_choose_server",
            )
        return found

    async def _end_tokens(self, handle: AsyncClient | AsyncSession) -> list[int]:
        if self._end_token_ids is None:
            self._end_token_ids = await handle.end_token_ids()
        return self._end_token_ids

    async def tokenize(self, messages: Sequence[Mapping[str, Any]] | str, **options: Any) -> list[int]:
        """The ids of a conversation's prompt, or of a text, like `AsyncSession.tokenize`."""
        return await self.server_handles[0].tokenize(messages, **options)

    def _sampling(self, given: Mapping[str, Any], prompt_tokens: int) -> tuple[dict[str, Any], bool]:
        """The parameters of the request, and whether logprobs are wanted."""
        params = {name: _plain(value) for name, value in given.items() if value is not None and name not in _OF_TEXT}
        if "prompt_logprobs" in params:
            message = "'prompt_logprobs' is not supported: the server has logprobs of sampled tokens only"
            raise UnsupportedParameter(message, param="sampling_params.prompt_logprobs")
        wants_logprobs = params.pop("logprobs", True) is not False
        for name in params:
            if name not in _KNOWN:
                known = ", ".join(sorted(_KNOWN))
                raise InvalidRequest(f"'{name}' is unknown; known are {known}", param=f"sampling_params.{name}")
        if self.config is not None:
            self._limit(params, prompt_tokens)
        return params, wants_logprobs

    def _limit(self, params: dict[str, Any], prompt_tokens: int) -> None:
        assert self.config is not None
        rollout = self.config.actor_rollout_ref.rollout
        name = next((name for name in (*_LIMITS, "max_completion_tokens") if name in params), None)
        if name is None:
            name, both = "max_tokens", rollout.prompt_length + rollout.response_length
            params[name] = min(rollout.response_length, both - prompt_tokens)
            if params[name] < 1:
                raise PromptTooLong(
                    f"the prompt has {prompt_tokens} tokens, and prompt_length + response_length of "
                    f"actor_rollout_ref.rollout are {both}; shorten the prompt, raise them, or give 'max_tokens'",
                    param="prompt_ids",
                )
        if rollout.max_model_len is not None:
            params[name] = min(params[name], rollout.max_model_len - prompt_tokens - 1)
            if params[name] < 1:
                raise PromptTooLong(
                    f"the prompt has {prompt_tokens} tokens, and actor_rollout_ref.rollout.max_model_len is "
                    f"{rollout.max_model_len}",
                    param="prompt_ids",
                )


def _checked(handle: object) -> AsyncClient | AsyncSession:
    if isinstance(handle, AsyncClient | AsyncSession):
        return handle
    message = f"a server must be an address, an AsyncClient or an AsyncSession, not {type(handle).__name__!r}"
    raise InvalidRequest(message, param="server_handles")


def _is_given(media: object) -> bool:
    return media is not None and (not isinstance(media, Sequence) or len(media) > 0)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value
