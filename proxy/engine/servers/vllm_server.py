"""One vLLM server over its OpenAI-compatible `/v1/completions`: prompt ids in, token ids and logprobs out.

Prompts with images use another endpoint (`proxy.engine.servers.vllm_sight`).

A request is rejected if its logprobs would break the logprob rule of `proxy.engine.chunks`: vLLM's `raw_logprobs` (its
default) are taken at temperature 1, before penalties and bias; its `processed_logprobs` are taken after all of these
and after truncation. Written to vLLM's documented API and tested against a simulated server, not against vLLM.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from proxy.engine.callbacks import generated
from proxy.engine.chunks import TakeChunk, TokenChunk
from proxy.engine.interface import Capability, EngineInfo, PauseMode, WeightTransfer
from proxy.engine.requests import GenerateRequest, check_request
from proxy.engine.servers.connection import NO_KEYS, EventStream, Keys, ServerConnection, Stopped, with_prompt
from proxy.engine.servers.sent_images import Eyes
from proxy.engine.servers.vllm_sight import PATH, SeenReply, blindness, malformed, sent
from proxy.images.quoted import without_images
from proxy.types import Logprobs, SamplingParams, ids_of
from tokengrove.errors import (
    EngineFailed,
    EngineIncapable,
    EngineUnavailable,
    InvalidRequest,
    ProxyError,
    UnsupportedParameter,
)
from tokengrove.reasons import FinishReason

_DEFAULT_CONTEXT = 32_768
_SERVER_ERROR = 500
_ID_MARK = "token_id:"
_MINUS_INFINITY = -9999.0
"""The value that vLLM writes for minus infinity, which JSON cannot express."""

_CAPABILITIES = frozenset(
    {
        *(Capability.TOP_LOGPROBS, Capability.SEED, Capability.DETERMINISTIC),
        *(Capability.RELEASE_MEMORY, Capability.STREAMING),
    }
)
_PROCESSED = frozenset({Capability.PENALTIES, Capability.LOGIT_BIAS, Capability.MIN_TOKENS})
_WAKE_TAGS = ("weights", "kv_cache")
_NEVER = -100.0
"""The lowest bias that vLLM accepts. Its raw logprobs are taken before the bias."""


class VllmServer:
    """Implements `RemoteEngine`. `processed_logprobs`: vLLM runs with `--logprobs-mode processed_logprobs`.

    `eyes`: None unless it is a vision model.
    """

    def __init__(
        self,
        url: str,
        vocab_size: int,
        *,
        processed_logprobs: bool = False,
        keys: Keys = NO_KEYS,
        eyes: Eyes | None = None,
    ) -> None:
        self._connection = ServerConnection(url, keys)
        self.url = self._connection.url
        self._vocab_size = vocab_size
        self._processed = processed_logprobs
        self._model = ""
        self._context_length = _DEFAULT_CONTEXT
        self._replies: dict[str, EventStream] = {}
        self._eyes = eyes
        self._never = {} if eyes is None else eyes.never_sampled(_NEVER)
        self.blind = ""

    async def start(self) -> None:
        """Read the server's model and context length. Raises EngineLost, EngineUnavailable."""
        await self.check()
        models = (await self._connection.probe("/v1/models") or {}).get("data")
        if not models:
            raise EngineUnavailable(f"{self.url} serves no model")
        self._model = models[0]["id"]
        self._context_length = int(models[0].get("max_model_len") or _DEFAULT_CONTEXT)
        if self._eyes is not None:
            self.blind = await blindness(self._connection, self._model)

    async def check(self) -> int:
        """Return 0, as vLLM has no weight versions. Raises EngineLost or EngineUnavailable."""
        if await self._connection.probe("/version") is None:
            raise EngineUnavailable(f"{self.url} is not a vLLM server: it has no /version")
        return 0

    async def rests(self) -> bool:
        """False: this proxy pauses no vLLM server, and the API that it uses does not report pauses."""
        return False

    async def sample(self, request: GenerateRequest, take: TakeChunk) -> FinishReason | None:
        """Sample a continuation. Raises EngineLost, InvalidRequest, UnsupportedParameter or EngineFailed."""
        check_request(request, self._vocab_size, self._context_length)
        self._check_logprobs(request.sampling)
        finish: FinishReason | None = None
        seen = None if request.images is None else SeenReply(request.prompt, request.top_logprobs)

        def read(events: Sequence[Any]) -> bool:
            nonlocal finish
            for event in events:
                for chunk in _chunks(event, request.top_logprobs, seen):
                    finish = take(chunk) or chunk.finish
                    if chunk.finish is not None:
                        return True
                    if finish is not None:
                        raise Stopped
            return False

        reply = self._replies[request.request_id] = EventStream(read)
        try:
            if seen is not None:
                await self._see(request, reply)
            else:
                body = with_prompt(self._body(request), "prompt", request.prompt)
                await self._connection.stream("/v1/completions", body, request.trace_headers(), reply)
        except Stopped:  # vLLM ends the request when the connection is closed
            if finish is None:
                return take(TokenChunk(ids_of(), Logprobs("f"), 0, FinishReason.ABORT)) or FinishReason.ABORT
        finally:
            del self._replies[request.request_id]
        return finish

    async def _see(self, request: GenerateRequest, reply: EventStream) -> None:
        """Send a request with images, unless it is aborted first."""
        if self._eyes is None or self.blind:
            raise UnsupportedParameter(f"{self.url} takes no images: {self.blind}", param="messages")
        body = await sent(self._eyes.images, request, self._body(request))
        if reply.ended.done():
            raise Stopped
        await self._connection.stream(PATH, body, request.trace_headers(), reply)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """The same, as a generator."""
        return generated(self.sample, request)

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        """Return the fields of a request except `prompt`."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(request.stop_token_ids),
            "ignore_eos": sampling.ignore_eos or not request.stop_token_ids,
            "logprobs": request.top_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "stream": True,
        }
        if sampling.ignore_eos:
            body["stop_token_ids"] = []
        if sampling.logit_bias or self._never:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias} | self._never
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.min_tokens:
            body["min_tokens"] = sampling.min_tokens
        return body

    def _check_logprobs(self, sampling: SamplingParams) -> None:
        """Raise UnsupportedParameter if the server's logprobs would break the logprob rule."""
        if self._processed:
            if (name := _truncates(sampling)) is not None:
                raise UnsupportedParameter(
                    f"'{name}' must truncate nothing: this vLLM server takes logprobs after truncation",
                    param=name,
                )
        elif (name := _changes_logits(sampling)) is not None:
            raise UnsupportedParameter(
                f"'{name}' is not supported: this vLLM server takes logprobs at temperature 1, before penalties and "
                "bias; run it with --logprobs-mode processed_logprobs, and tokengrove with --engine-arg "
                "logprobs_mode=processed_logprobs",
                param=name,
            )

    async def abort(self, request_id: str) -> None:
        """End a request with `FinishReason.ABORT`; unknown ids are ignored."""
        if (reply := self._replies.get(request_id)) is not None:
            reply.fail(Stopped())

    def cut(self) -> None:
        """Abandon all replies in flight: each raises EngineLost."""
        self._connection.cut()

    async def pause(self, mode: PauseMode) -> None:
        """End requests in flight; the gate admits no more. Raises EngineIncapable for a mode that keeps their state."""
        if mode is not PauseMode.ABORT and self._replies:
            raise EngineIncapable("a vLLM server cannot pause requests in place; use mode abort or drain")
        for request_id in list(self._replies):
            await self.abort(request_id)

    async def follow(self, mode: PauseMode | None, version: int | None) -> None:
        """End requests in flight if another process pauses. Raises like `pause`."""
        if mode is not None:
            await self.pause(mode)

    async def resume(self) -> None:
        """Do nothing: `pause` leaves the server running."""

    async def update_weights(self, path: str, version: int | None = None, *, busy: bool = False) -> int:
        """Raises EngineIncapable: vLLM has no endpoint that loads weights from a folder."""
        raise EngineIncapable(
            "a vLLM server cannot load weights from a folder; restart it with the new weights, or use SGLang"
        )

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        """Raises EngineIncapable: the steps are SGLang's."""
        raise EngineIncapable(f"a vLLM server has no {step.value}; use SGLang for weight transfers")

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        """Put vLLM to sleep at level 1. The server needs `--enable-sleep-mode` and VLLM_SERVER_DEV_MODE=1.

        Raises InvalidRequest for `tags`: vLLM releases all memory or none.
        """
        if tags:
            raise InvalidRequest("a vLLM server releases all of its memory or none; leave out 'tags'", param="tags")
        await self._connection.call("/sleep?level=1")

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        """Wake vLLM up: the weights and KV cache that `tags` name, or all."""
        wanted = [f"tags={tag}" for tag in tags if tag in _WAKE_TAGS]
        if wanted or not tags:
            await self._connection.call("/wake_up" + ("?" if wanted else "") + "&".join(wanted))

    async def flush_cache(self) -> None:
        """Empty the prefix cache."""
        await self._connection.call("/reset_prefix_cache")

    @property
    def world_size(self) -> int:
        """1: vLLM does not take part in weight transfers."""
        return 1

    def info(self) -> EngineInfo:
        """Facts about the server; valid after `start`."""
        return EngineInfo(
            name="vllm",
            model=self._model,
            vocab_size=self._vocab_size,
            context_length=self._context_length,
            weight_version=0,
            capabilities=_CAPABILITIES
            | (_PROCESSED if self._processed else frozenset())
            | (frozenset() if self._eyes is None or self.blind else {Capability.IMAGES}),
            detail=f"vLLM at {self.url}",
        )

    async def close(self) -> None:
        """End requests in flight and close the connections; the server keeps running."""
        for request_id in list(self._replies):
            await self.abort(request_id)
        await self._connection.close()


def _chunks(event: Mapping[str, Any], top: int, seen: SeenReply | None = None) -> list[TokenChunk]:
    """The chunk of an event, or none without tokens and finish reason. Raises InvalidRequest or EngineFailed."""
    if not isinstance(event, Mapping):
        raise EngineFailed(f"the engine answered with a {type(event).__name__} instead of an object")
    if (error := event.get("error")) is not None:
        raise _refusal(error)
    if seen is not None:
        return seen.chunks(event)
    if not event.get("choices"):
        return []
    try:
        return _chunk(event["choices"][0], top)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as wrong:
        raise malformed(wrong) from None


def _chunk(choice: Mapping[str, Any], top: int) -> list[TokenChunk]:
    ids, told = choice.get("token_ids") or [], choice.get("logprobs") or {}
    logprobs = told.get("token_logprobs") or []
    if len(ids) != len(logprobs) or None in logprobs:
        raise EngineFailed(
            f"the engine gave {len(logprobs)} logprobs for {len(ids)} tokens; vLLM 0.10.2 or later is needed"
        )
    if logprobs and min(logprobs) <= _MINUS_INFINITY:
        raise EngineFailed("the engine gave a token the probability 0")
    reason = choice.get("finish_reason")
    if reason is not None and reason not in _FINISH:
        shown = "the engine ended a reply with a reason that vLLM does not have"
        raise EngineFailed(f"the engine ended a reply with '{reason}'").showing(shown)
    finish = _FINISH[reason] if reason else None
    tops = [_ranked(entry, top) for entry in told.get("top_logprobs") or []] if top else []
    if not ids and finish is None:
        return []
    return [TokenChunk(ids_of(ids), array("f", logprobs), 0, finish, tuple(tops))]


_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


def _refusal(error: Any) -> ProxyError:
    """The exception for an error in a stream: EngineFailed for code 500 and above, else InvalidRequest."""
    told: Mapping[str, Any] = error if isinstance(error, Mapping) else {"message": error}
    code, message = told.get("code"), without_images(str(told.get("message")))
    if isinstance(code, int) and code >= _SERVER_ERROR:
        return EngineFailed(f"the engine failed: {message}").showing("the engine failed")
    return InvalidRequest(f"the engine refused the request: {message}").showing("the engine refused the request")


def _truncates(sampling: SamplingParams) -> str | None:
    """The first parameter that truncates the distribution, if any."""
    doing = {
        "temperature": sampling.temperature == 0.0,
        "top_p": sampling.top_p != 1.0,
        "top_k": sampling.top_k > 0,
        "min_p": sampling.min_p != 0.0,
    }
    return next((name for name, does in doing.items() if does), None)


def _changes_logits(sampling: SamplingParams) -> str | None:
    """The first parameter that changes the distribution from the model's own at temperature 1, if any."""
    if sampling.temperature not in (0.0, 1.0):
        return "temperature"
    if sampling.logit_bias:
        return "logit_bias"
    if sampling.min_tokens:
        return "min_tokens"
    neutral = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    return next((name for name, value in neutral.items() if getattr(sampling, name) != value), None)


def _ranked(entry: Mapping[str, float], top: int) -> tuple[tuple[int, float], ...]:
    """At most `top` alternatives named `token_id:N`, highest first. vLLM may add the sampled token to them."""
    pairs = [(int(name.removeprefix(_ID_MARK)), value) for name, value in entry.items()]
    return tuple(sorted(pairs, key=lambda pair: -pair[1])[:top])
