"""SGLang's request parameters and replies, the same in this process and over HTTP.

Every token gets its own logprob and weight version, or the call fails: a reply with lists of different lengths is
rejected. SGLang's lists are shared and grow while they are read, so they are copied by length. Before the last part,
SGLang reports the version that was served when the part was sent. It may be newer than the version that sampled the
tokens, so the part in which it changes keeps the older version. The last part has the versions of all tokens, and
corrects earlier parts. A version that is not believed labels no token: its tokens get the last believed version, and
count as uncertain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from proxy.engine.chunks import TokenChunk
from proxy.engine.grammar import structural_tag
from proxy.engine.requests import GenerateRequest
from proxy.engine.scored_prompt import ScoredPrompt
from proxy.engine.sglang.replay import ReplayPlan, ReplayRows
from proxy.engine.sglang.scores import read_scores
from proxy.engine.version_names import VersionNumbers, version_chunks
from proxy.engine.versions import divided, with_run
from proxy.images.quoted import without_images
from proxy.types import Ids, Logprobs, VersionRuns, ids_of
from tokengrove.errors import EngineBusy, EngineFailed, InvalidRequest, ProxyError
from tokengrove.reasons import FinishReason

_logprob_of, _token_of = itemgetter(0), itemgetter(1)
_WHOLE_VOCABULARY = -1
_BAD_REQUEST, _SERVER_ERROR = 400, 500
_BUSY = (429, 503)


def sampling_params(request: GenerateRequest, stream_interval: int | None) -> dict[str, Any]:
    """Return SGLang's `sampling_params`. `stream_interval`: tokens per part; None for the server's setting."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else _WHOLE_VOCABULARY,
        "min_p": sampling.min_p,
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": sampling.ignore_eos or not request.stop_token_ids,
        "skip_special_tokens": False,
    }
    for name, default in (("presence_penalty", 0.0), ("frequency_penalty", 0.0), ("repetition_penalty", 1.0)):
        if (value := getattr(sampling, name)) != default:
            params[name] = value
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.min_tokens and request.stop_token_ids:
        params["min_new_tokens"] = sampling.min_tokens
    if request.grammar is not None:
        params["structural_tag"] = structural_tag(request.grammar)
    if stream_interval is not None:
        params["stream_interval"] = stream_interval
    return params


@dataclass(slots=True)
class SglangReply:
    """The state of one reply in progress.

    `prompt_tokens`: the length of the prompt that was sent. `incremental`: each part has only the new tokens, else all
    tokens so far. `finish`: the finish reason, once it has ended. `ids`: the tokens that were turned into chunks.
    `said`: the version runs that were reported for them. `version`: the believed weight version, initially the server's
    version when the request was sent. `name`, `certain`: the version name in the latest part, and whether it is
    believed. `unsure`: the number of tokens with an uncertain version. `plan`: the side columns of the request, if any.
    `scored`: the prompt tokens whose logprobs were requested, if any; such a reply has one part.
    """

    numbers: VersionNumbers
    prompt_tokens: int
    incremental: bool = False
    finish: FinishReason | None = None
    ids: Ids = field(default_factory=ids_of)
    said: VersionRuns = ()
    version: int = 0
    name: Any = None
    certain: bool = True
    unsure: int = 0
    plan: ReplayPlan | None = None
    scored: ScoredPrompt | None = None
    sent: int = field(init=False)
    rows: ReplayRows | None = field(init=False)

    def __post_init__(self) -> None:
        self.sent = self.version
        self.rows = None if self.plan is None else ReplayRows(self.plan, self.prompt_tokens)

    def read(self, parts: Iterable[Any], serving: int | None = None, newest: int | None = None) -> list[TokenChunk]:
        """Return the new tokens of parts that arrived together, one chunk per weight version.

        `serving`: the current weight version of the server. `newest`: the newest version that it has ever had. Both
        are None if unknown. Raises InvalidRequest for a refusal, and EngineFailed for a part that is malformed or
        contradicts earlier parts.
        """
        before, told, unsure = len(self.ids), self.said, self.unsure
        ids, logprobs = Ids("i"), Logprobs("f")
        tops: list[tuple[tuple[int, float], ...]] = []
        finish = cached = scores = None
        try:
            for part in parts:
                meta = part.get("meta_info") if isinstance(part, dict) and part.get("error") is None else None
                if not isinstance(meta, dict) or "completion_tokens" not in meta:
                    raise _refusal(part)
                total, reason, sent = int(meta["completion_tokens"]), meta.get("finish_reason"), len(self.ids)
                new = total - sent
                if self.rows is not None:
                    self.rows.read(meta, total)
                if not new and reason is None:
                    continue
                if reason is not None:
                    finish = _finish(reason)
                    if self.scored is not None and finish is not FinishReason.ABORT:
                        scores = read_scores(self.scored, meta)
                if sent == 0:
                    cached, told_prompt = meta.get("cached_tokens"), meta.get("prompt_tokens")
                    if cached is not None and type(cached) is not int:
                        raise TypeError("a count of tokens is no integer")
                    if told_prompt is not None and told_prompt != self.prompt_tokens:
                        raise _other_prompt(told_prompt, self.prompt_tokens)
                elif not self.incremental:
                    self._check_said(part.get("output_ids"), whole=finish is not None)
                spans, name, version = meta.get("weight_versions"), meta.get("weight_version"), self.version
                certain = self.certain
                if name is not None and name != self.name:
                    self.name, (self.version, self.certain) = name, self.numbers.named(name, version, newest)
                    if self.version != version:  # it changed somewhere in this part, unless it has spans
                        version, certain = min(version, self.version), False
                    else:
                        certain = self.certain
                elif name is None and serving is not None and serving != self.sent:  # since when, it does not say
                    version = self.version = min(version, serving)
                    certain = self.certain = False
                if spans:
                    told, unsure = self.numbers.spans(spans, total, self.sent, newest)
                else:
                    told = with_run(told, new, version) if told or not new else ((new, version),)
                    unsure += 0 if certain else new
                if not new:
                    continue  # only the end, without tokens
                # Shared lists of SGLang may already have grown beyond the tokens of a cumulative part.
                span = slice(-new, None) if self.incremental else slice(total - new, total)
                sampled = (meta.get("output_token_logprobs") or [])[span]
                taken = part.get("output_ids") or []
                if not self.incremental:
                    taken = taken[span]
                elif finish is FinishReason.ABORT:  # the last id is repeated if the reader is behind
                    taken = taken[:new]
                if not len(taken) == len(sampled) == new:
                    raise EngineFailed(f"the engine gave {len(taken)} ids and {len(sampled)} logprobs for {new} tokens")
                try:
                    logprobs.fromlist(list(map(_logprob_of, sampled)))
                    tokens = list(map(_token_of, sampled))
                    ids.fromlist(tokens)
                except (TypeError, LookupError, OverflowError):
                    raise EngineFailed("the engine gave a token without its logprob") from None
                if tokens != taken:
                    raise EngineFailed("the engine gave logprobs of other tokens than it sampled")
                self.ids += ids[sent - before :]
                if self.rows is not None:
                    self.rows.read_sets(meta, slice(sent, total), tokens, sampled)
                tops += map(_ranked, (meta.get("output_top_logprobs") or [])[span])
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            message = f"the engine's answer does not have SGLang's form: {type(error).__name__}: {error}"
            raise EngineFailed(message).showing("the engine's answer does not have SGLang's form") from None
        if len(self.ids) == before and finish is None:
            return []
        said, runs = divided(told, before) if before else ((), told)
        correction = said if said != self.said else ()
        more, self.unsure = unsure - self.unsure, unsure
        self.said, self.finish = told, finish
        chunks = version_chunks(runs or ((0, self.version),), ids, logprobs, tops, finish, cached, correction, more)
        if self.rows is not None:  # the first chunk has them all, since the turn may end after it
            chunks[0].columns = self.rows.taken()
        if scores is not None:
            chunks[0].prompt_logprobs, chunks[0].prompt_top = scores
        return chunks

    def _check_said(self, ids: Any, *, whole: bool) -> None:
        """Raise EngineFailed if a cumulative part repeats, loses or changes tokens of earlier parts.

        Only the latest earlier token is compared, which detects a shift immediately. `whole`: compare all tokens.
        """
        sent = len(self.ids)
        if ids and (len(ids) < sent or ids[sent - 1] != self.ids[-1] or (whole and ids[:sent] != self.ids.tolist())):
            raise EngineFailed("the engine changed tokens that it had sent before")


def _refusal(out: Any) -> ProxyError:
    """The exception for a part without tokens and `meta_info`."""
    if not isinstance(out, dict):
        return EngineFailed(f"the engine answered with a {type(out).__name__} instead of an object")
    if (error := out.get("error")) is not None:
        status = error.get("code") if isinstance(error, dict) else None
        return _failure(status, f"the engine refused the request: {_message(error)}")
    return EngineFailed("the engine's answer lacks 'meta_info' with 'completion_tokens'")


def _finish(reason: Any) -> FinishReason:
    """Map SGLang's finish reason. Raises InvalidRequest or EngineFailed for an abort that reports an error."""
    kind = reason["type"] if isinstance(reason, dict) else reason
    if kind == "abort":
        status = reason.get("status_code") if isinstance(reason, dict) else None
        if status is not None and status >= _BAD_REQUEST:
            raise _failure(status, f"the engine aborted the request: {reason.get('message')}")
        return FinishReason.ABORT
    return FinishReason.LENGTH if kind == "length" else FinishReason.STOP


def _failure(status: Any, message: str) -> ProxyError:
    """The exception for an error with a status: EngineBusy for a full queue; InvalidRequest also without a status."""
    message = without_images(message)
    if status in _BUSY:
        return EngineBusy(message).showing("the engine is busy")
    if isinstance(status, int) and status >= _SERVER_ERROR:
        return EngineFailed(message).showing("the engine failed")
    return InvalidRequest(message).showing("the engine refused the request")


def _other_prompt(told: Any, sent: int) -> EngineFailed:
    """The error if the engine continued another prompt than it was sent, such as a truncated one."""
    count = told if type(told) is int else "an unknown number of"
    return EngineFailed(f"the engine continued a prompt of {count} tokens, but was sent {sent}")


def _ranked(top: Sequence[Sequence[Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((entry[1], entry[0]) for entry in top)


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, Mapping) else str(error)
