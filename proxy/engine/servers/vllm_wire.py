"""vLLM's requests and replies: ids in, and ids with logprobs and weight versions out.

Two endpoints have them: `/inference/v1/generate`, and `/v1/completions` for servers without it. Every token gets its
own logprob, or the call fails. Only the last part of a reply reports weight versions, for all tokens; it corrects the
earlier parts. Which distribution the logprobs are of depends on the server's `--logprobs-mode` and on the request
(`logprobs_of`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from proxy.engine.chunks import TokenChunk
from proxy.engine.grammar import structural_tag
from proxy.engine.requests import GenerateRequest
from proxy.engine.scored_prompt import ScoredPrompt
from proxy.engine.servers.vllm_columns import START, ReplyColumns, first_experts
from proxy.engine.servers.vllm_scores import ask_for_scores, read_scores
from proxy.engine.version_names import VersionNumbers, version_chunks
from proxy.engine.versions import divided, with_run
from proxy.images.quoted import without_images
from proxy.prompt_ids import PromptIds
from proxy.types import Ids, Logprobs, SamplingParams, VersionRuns, ids_of
from tokengrove.errors import EngineBusy, EngineFailed, InvalidRequest, ProxyError
from tokengrove.reasons import FinishReason, LogprobsOf

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"

_BUSY, _SERVER_ERROR = (429, 503), 500
_ID_MARK = "token_id:"
_MINUS_INFINITY = -9999.0
"""The value that vLLM writes for minus infinity and NaN, which JSON cannot express."""

_MOST_TOPS = 20
"""The default of vLLM's `--max-logprobs`."""

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}

Tops = tuple[tuple[int, float], ...]


def logprobs_of(sampling: SamplingParams, *, processed: bool) -> LogprobsOf:
    """The distribution that a server's logprobs are of. `processed`: its `--logprobs-mode` is `processed_logprobs`.

    Measured against forward passes: `processed_logprobs` are of the distribution that is sampled from, at temperature 1
    for greedy requests; `raw_logprobs` are the model's after the mask of a grammar.
    """
    if processed:
        truncates = sampling.top_p != 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
        return LogprobsOf.SAMPLED if truncates and sampling.temperature > 0.0 else LogprobsOf.RULE
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    plain = penalties == (0.0, 0.0, 1.0) and not sampling.logit_bias and not sampling.min_tokens
    return LogprobsOf.RULE if plain and sampling.temperature in (0.0, 1.0) else LogprobsOf.MODEL


def sampling_params(request: GenerateRequest, never: Mapping[str, float]) -> dict[str, Any]:
    """The sampling parameters that both endpoints have. `never`: the `logit_bias` of tokens that are never sampled.

    The server's own end tokens are ignored, since `stop_token_ids` has all that end the output.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "stop_token_ids": [] if sampling.ignore_eos else list(request.stop_token_ids),
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    for name, default in (("presence_penalty", 0.0), ("frequency_penalty", 0.0), ("repetition_penalty", 1.0)):
        if (value := getattr(sampling, name)) != default:
            params[name] = value
    if sampling.logit_bias or never:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias} | dict(never)
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    if sampling.min_tokens and params["stop_token_ids"]:
        params["min_tokens"] = sampling.min_tokens
    return params


def generate_body(
    request: GenerateRequest, params: dict[str, Any], interval: int, *, returns_experts: bool = False
) -> dict[str, Any]:
    """The body for GENERATE without `token_ids`. `interval`: the tokens per part of the reply.

    `returns_experts`: the server returns experts to every request.
    """
    # Of n alternatives vLLM sends the first n, beginning with the sampled token, which may not be among the likeliest.
    tops = min(request.top_logprobs + 1, _MOST_TOPS)
    body: dict[str, Any] = {
        "sampling_params": {**params, "logprobs": tops, "detokenize": False, "stream_interval": interval},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.grammar is not None:
        body["sampling_params"]["structured_outputs"] = {"structural_tag": structural_tag(request.grammar)}
        body["reasoning_ended"] = True  # else a server with a reasoning parser samples freely before the grammar
    if request.images is not None:
        body["return_token_ids"] = True
    if (start := first_experts(request)) is not None:
        body["sampling_params"][START] = start
    elif returns_experts:
        body["sampling_params"][START] = len(request.prompt) - 1  # of as few tokens as possible
    if request.scored_from is not None:
        ask_for_scores(request, body, body["sampling_params"])
    return body


def completions_body(request: GenerateRequest, params: dict[str, Any]) -> dict[str, Any]:
    """The body for COMPLETIONS without `prompt`."""
    body: dict[str, Any] = {
        **params,
        "logprobs": request.top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.scored_from is not None:
        ask_for_scores(request, body, body)
    return body


@dataclass(slots=True)
class VllmReply:
    """The state of one reply in progress.

    `numbers`: the version names of the pool. `prompt`: the prompt that was sent. `top`: the number of alternatives per
    token that were requested. `of`: the distribution of the logprobs. `version`: the believed weight version, initially
    the server's version when the request was sent. `says_ids`: the server returns the ids that it runs on, which must
    be those of `prompt`. `model`: the name of the adapter that was asked, which a reply that has a name must have.
    `columns`: the side columns that were requested; None: none. `scored`: the prompt tokens whose logprobs were
    requested, if any; such a reply has one event. `finish`: the finish reason, once it has arrived. `given`: the last
    chunk was returned.
    """

    numbers: VersionNumbers
    prompt: PromptIds
    top: int
    of: LogprobsOf
    version: int = 0
    says_ids: bool = False
    model: str = ""
    columns: ReplyColumns | None = None
    scored: ScoredPrompt | None = None
    finish: FinishReason | None = None
    given: bool = False
    ids: Ids = field(default_factory=ids_of)
    _told: VersionRuns = ()
    _unsure: int = 0
    _cached: int | None = None
    _counted: bool = False
    _sent: int = field(init=False)

    def __post_init__(self) -> None:
        self._sent = self.version

    def read(self, events: Iterable[Any], serving: int, newest: int) -> list[TokenChunk]:
        """Return the new tokens of events that arrived together, one chunk per weight version.

        The finish reason waits for the event with the token counts, which follows the last token. `serving`: the
        current weight version of the server. `newest`: the newest version that it has ever had. Raises InvalidRequest
        for a refusal, and EngineFailed for a malformed event.
        """
        before, said, unsure = len(self.ids), self._told, self._unsure
        logprobs, tops, scores = Logprobs("f"), list[Tops](), None
        try:
            for event in events:
                if (choice := self._choice(event)) is not None:
                    self._add(choice, logprobs, tops, serving, newest)
                    if self.scored is not None and self.finish is not FinishReason.ABORT:
                        scores = read_scores(self.scored, event, choice)
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            plain = "the engine's answer does not have vLLM's form"
            raise EngineFailed(f"{plain}: {type(error).__name__}: {error}").showing(plain) from None
        finish = self.finish if self._counted else None
        columns = self.columns.taken(logprobs, len(self.ids)) if self.columns is not None else None
        if len(self.ids) == before and finish is None and self._told == said and columns is None:
            return []
        chunks = self._chunks(before, said, unsure, logprobs, tops, finish)
        chunks[0].columns = columns  # their rows have positions of their own
        if scores is not None:
            chunks[0].prompt_logprobs, chunks[0].prompt_top = scores
        return chunks

    def last(self) -> list[TokenChunk]:
        """Return the chunk with the finish reason if no event with token counts followed it."""
        if self.finish is None or self.given:
            return []
        return self._chunks(len(self.ids), self._told, self._unsure, Logprobs("f"), [], self.finish)

    def _chunks(
        self,
        before: int,
        said: VersionRuns,
        unsure: int,
        logprobs: Logprobs,
        tops: Sequence[Tops],
        finish: FinishReason | None,
    ) -> list[TokenChunk]:
        earlier, runs = divided(self._told, before)
        correction = earlier if earlier != said else ()
        self.given = finish is not None
        chunks = version_chunks(
            runs or ((0, self.version),),
            *(self.ids[before:], logprobs, tops, finish),
            *(self._cached if finish is not None else None, correction, self._unsure - unsure),
        )
        for chunk in chunks:
            chunk.logprobs_of = self.of
        return chunks

    def _choice(self, event: Any) -> Mapping[str, Any] | None:
        """The choice of an event, or None for an event with token counts only. Raises the error of an event."""
        if not isinstance(event, dict):
            raise EngineFailed(f"the engine answered with a {type(event).__name__} instead of an object")
        if (error := event.get("error")) is not None:
            raise _refusal(error)
        if (usage := event.get("usage")) is not None:
            self._count(usage)
        if self.model and (named := event.get("model")) not in (None, self.model):
            raise EngineFailed(f"the engine answered as {named!r}, but was asked as {self.model!r}")
        if not (choices := event.get("choices")):
            return None
        if self.says_ids:
            self._check_prompt(event.get("prompt_token_ids"))
            self.says_ids = False  # only the first event has them
        (choice,) = choices
        return cast("Mapping[str, Any]", choice)

    def _count(self, usage: Mapping[str, Any]) -> None:
        """Raise EngineFailed if the engine continued another prompt than it was sent, such as a truncated one."""
        if (told := usage["prompt_tokens"]) != len(self.prompt):
            count = told if type(told) is int else "an unknown number of"
            raise EngineFailed(f"the engine continued a prompt of {count} tokens, but was sent {len(self.prompt)}")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None and type(cached) is not int:
            raise TypeError("a count of tokens is no integer")
        self._cached, self._counted = cached, True

    def _check_prompt(self, told: Any) -> None:
        ours = self.prompt
        if not isinstance(told, list):
            raise EngineFailed("the engine does not say which ids it runs on; a newer vLLM does")
        if told != ours.joined.tolist():
            raise EngineFailed(
                f"the engine ran on a prompt of {len(told)} tokens, but was sent {len(ours)}: its processor is not ours"
                if len(told) != len(ours)
                else f"the engine ran on a prompt of {len(told)} other tokens than it was sent"
            )

    def _add(self, choice: Mapping[str, Any], logprobs: Logprobs, tops: list[Tops], serving: int, newest: int) -> None:
        """Add the tokens of a choice to `ids`, `logprobs` and `tops`, and the versions that it reports."""
        ids, values, alternatives = tokens_of(choice, self.top)
        if values and min(values) <= _MINUS_INFINITY:
            raise EngineFailed("the engine gave a token the probability 0")
        self.ids.fromlist(ids)
        logprobs.fromlist(values)
        if self.columns is not None:
            self.columns.add(choice, ids, len(self.ids))
        if self.top:
            tops += [_ranked(each, self.top) for each in alternatives]
        if (reason := choice.get("finish_reason")) is not None:
            if reason not in _FINISH:
                shown = "the engine ended a reply with a reason that vLLM does not have"
                raise EngineFailed(f"the engine ended a reply with '{reason}'").showing(shown)
            self.finish = _FINISH[reason]
        if spans := choice.get("weight_versions"):
            self._told, self._unsure = self.numbers.spans(spans, len(self.ids), self._sent, newest)
            return
        certain = serving == self._sent
        if not certain:  # it changed since the request was sent, and the event does not say when
            self.version = min(self.version, serving)
        self._told = with_run(self._told, len(ids), self.version)
        self._unsure += 0 if certain else len(ids)


def tokens_of(choice: Mapping[str, Any], top: int) -> tuple[list[int], list[float], Iterable[list[tuple[int, float]]]]:
    """The ids of a choice, their logprobs, and alternatives for each, in any order. Raises EngineFailed."""
    ids, told = choice.get("token_ids") or [], choice.get("logprobs") or {}
    values, alternatives = _named(ids, told["content"], top) if "content" in told else _listed(told)
    if len(ids) != len(values) or None in values:
        raise EngineFailed(
            f"the engine gave {len(values)} logprobs for {len(ids)} tokens; vLLM 0.10.2 or later is needed"
        )
    return ids, values, alternatives


def _named(
    ids: Sequence[int], content: Sequence[Mapping[str, Any]] | None, top: int
) -> tuple[list[float], Iterable[Any]]:
    """The logprobs of GENERATE, and the `top` likeliest alternatives of each token as (id, logprob)."""
    content = content or []
    if [_token(entry) for entry in content] != ids:
        raise EngineFailed(f"the engine gave {len(content)} logprobs for {len(ids)} tokens, or those of others")
    return [entry["logprob"] for entry in content], (
        [
            (_token(other), other["logprob"])
            for other in entry.get("top_logprobs") or ()
            if (other.get("rank") or 1) <= top
        ]
        for entry in content
    )


def _listed(told: Mapping[str, Any]) -> tuple[list[float], Iterable[Any]]:
    """The logprobs of COMPLETIONS, and the alternatives of each token as (id, logprob)."""
    return told.get("token_logprobs") or [], (
        [(int(name.removeprefix(_ID_MARK)), value) for name, value in entry.items()]
        for entry in told.get("top_logprobs") or ()
    )


def _token(entry: Mapping[str, Any]) -> int:
    """The id of a token: a number in recent versions, `token_id:N` in older ones."""
    return int(entry["token_id"] if "token_id" in entry else entry["token"].removeprefix(_ID_MARK))


def _ranked(pairs: Iterable[tuple[int, float]], top: int) -> Tops:
    """At most `top` alternatives, highest first, without those that truncation excluded."""
    possible = [(token, float(value)) for token, value in pairs if value > _MINUS_INFINITY]
    return tuple(sorted(possible, key=lambda pair: -pair[1])[:top])


def _refusal(error: Any) -> ProxyError:
    """The exception for an error in a stream: EngineBusy for a full queue, EngineFailed for other codes from 500 on."""
    told: Mapping[str, Any] = error if isinstance(error, Mapping) else {"message": error}
    code, message = told.get("code"), without_images(str(told.get("message")))
    if code in _BUSY:
        return EngineBusy(f"the engine is busy: {message}").showing("the engine is busy")
    if isinstance(code, int) and code >= _SERVER_ERROR:
        return EngineFailed(f"the engine failed: {message}").showing("the engine failed")
    return InvalidRequest(f"the engine refused the request: {message}").showing("the engine refused the request")
