"""SGLang's request parameters and replies, the same in this process and over HTTP.

Every token gets its own logprob and weight version, or the call fails: a reply whose lists differ in length is refused.
SGLang's lists are shared and grow while they are read, so they are copied by length. Before the last part, SGLang names
the version served when the part was sent, which may be newer than the one that sampled its tokens; the last part has
the versions of all tokens, and corrects earlier parts.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.engine.chunks import TokenChunk
from proxy.engine.grammar import Grammar, GrammarPart
from proxy.engine.requests import GenerateRequest
from proxy.engine.versions import LARGEST_VERSION, divided, joined, with_run
from proxy.errors import EngineFailed, InvalidRequest
from proxy.types import FinishReason, VersionRuns, ids_of

_WHOLE_VOCABULARY = -1
_BAD_REQUEST, _SERVER_ERROR = 400, 500
_UNSTREAMED_INTERVAL = 32
"""Tokens per part for unstreamed replies: a thirtieth of the work, and stop strings still end a reply soon."""


@dataclass(slots=True)
class VersionNumbers:
    """Integers for an engine's version names: an integer name is itself, others are numbered in order of appearance.

    An integer above LARGEST_VERSION, such as 20261121120000, counts as one of the others: exports store int32.
    """

    names: list[str] = field(default_factory=list)

    def number(self, name: Any) -> int:
        """Return the integer of a version name, the same on every call."""
        text = str(name)
        if text.isdecimal() and int(text) <= LARGEST_VERSION:
            return int(text)
        if text not in self.names:
            self.names.append(text)
        return self.names.index(text)


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
    if request.grammar is not None:
        params["structural_tag"] = structural_tag(request.grammar)
    if stream_interval is not None:
        params["stream_interval"] = stream_interval
    return params


def stream_interval(request: GenerateRequest) -> int:
    """Tokens per part of the reply: 1 if the client streams, else 32."""
    return 1 if request.streamed else _UNSTREAMED_INTERVAL


def structural_tag(grammar: Grammar) -> str:
    """Return a grammar as an xgrammar structural tag, in JSON."""
    choices = [_sequence([_part(part) for part in parts]) for parts in grammar.alternatives]
    once = choices[0] if len(choices) == 1 else {"type": "or", "elements": choices}
    if not grammar.repeat:
        return json.dumps({"type": "structural_tag", "format": once})
    again = _sequence([*_separator(grammar), once])
    return json.dumps({"type": "structural_tag", "format": _sequence([once, {"type": "star", "content": again}])})


def _separator(grammar: Grammar) -> list[Any]:
    return [{"type": "const_string", "value": grammar.separator}] if grammar.separator else []


def _part(part: GrammarPart) -> Any:
    if part.schema is not None:
        return {"type": "json_schema", "json_schema": dict(part.schema), "max_whitespace_cnt": 1}
    if part.token_id is not None:
        return {"type": "token", "token": part.token_id}
    return {"type": "const_string", "value": part.text}


def _sequence(elements: Sequence[Any]) -> Any:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


@dataclass(slots=True)
class SglangReply:
    """The state of one reply in progress.

    `incremental`: each part has only the new tokens, else all tokens so far. `sent`: tokens that were turned into
    chunks. `said`: the version runs that were reported for them.
    """

    numbers: VersionNumbers
    incremental: bool = False
    sent: int = 0
    said: VersionRuns = ()

    def chunks(self, out: Mapping[str, Any]) -> Iterator[TokenChunk]:
        """Yield the new tokens of a part, one chunk per weight version. Raises InvalidRequest or EngineFailed."""
        meta = _meta(out)
        finish = _finish(meta.get("finish_reason"))
        total = int(meta["completion_tokens"])
        new = total - self.sent
        ids, sampled = self._new(out.get("output_ids") or [], new), self._sampled(meta, new)
        if len(ids) != new or [entry[1] for entry in sampled] != list(ids):
            raise EngineFailed(f"the engine gave {len(ids)} ids and {len(sampled)} logprobs for {new} tokens")
        logprobs = [_logprob(entry[0]) for entry in sampled]
        tops = self._new(meta.get("output_top_logprobs") or [], new)
        cached = meta.get("cached_tokens") if self.sent == 0 else None
        if not (new or finish):
            return
        told = self._told(meta, total)
        said, runs = divided(told, self.sent)
        correction = said if said != self.said else ()
        self.sent, self.said = total, told
        end = 0
        for index, (count, version) in enumerate(runs or ((0, self._version(meta)),)):
            start, end = end, end + count
            yield TokenChunk(
                ids=ids_of(ids[start:end]),
                logprobs=array("f", logprobs[start:end]),
                version=version,
                finish=finish if end == new else None,
                top_logprobs=tuple(_ranked(top) for top in tops[start:end]),
                cached_tokens=cached,
                corrected=correction if index == 0 else (),
            )

    def _new(self, values: Sequence[Any], count: int) -> Sequence[Any]:
        """The `count` new values. In a cumulative reply the shared list may already have grown further."""
        if self.incremental:
            return values[len(values) - count :] if count else []
        return values[self.sent : self.sent + count]

    def _sampled(self, meta: Mapping[str, Any], count: int) -> Sequence[Any]:
        """The entries (logprob, id, ...) of the new tokens."""
        return self._new(meta.get("output_token_logprobs") or [], count)

    def _told(self, meta: Mapping[str, Any], total: int) -> VersionRuns:
        """The version runs of all tokens, by this part. Raises EngineFailed if its spans overlap or leave gaps."""
        spans = meta.get("weight_versions")
        if not spans:
            return with_run(self.said, total - self.sent, self._version(meta))
        bounds = [(span["start"], min(span["end"], total), span["version"]) for span in spans]
        bounds = [(start, end, name) for start, end, name in bounds if end > start]
        if [start for start, _, _ in bounds] + [total] != [0] + [end for _, end, _ in bounds]:
            raise EngineFailed(f"the engine's spans of weight versions do not cover its {total} tokens exactly")
        return joined((), tuple((end - start, self.numbers.number(name)) for start, end, name in bounds))

    def _version(self, meta: Mapping[str, Any]) -> int:
        return self.numbers.number(meta.get("weight_version", 0))


def _meta(out: Any) -> Mapping[str, Any]:
    """Return `meta_info` of a reply. Raises InvalidRequest if it is a refusal, EngineFailed if it is malformed."""
    if not isinstance(out, Mapping):
        raise EngineFailed(f"the engine answered with a {type(out).__name__} instead of an object")
    if (error := out.get("error")) is not None:
        raise InvalidRequest(f"the engine refused the request: {_message(error)}")
    meta = out.get("meta_info")
    if not isinstance(meta, Mapping) or "completion_tokens" not in meta:
        raise EngineFailed("the engine's answer lacks 'meta_info' with 'completion_tokens'")
    return meta


def _logprob(value: Any) -> float:
    if value is None:
        raise EngineFailed("the engine gave a token without its logprob")
    return float(value)


def _finish(reason: Any) -> FinishReason | None:
    """Map SGLang's finish reason. Raises InvalidRequest or EngineFailed for an abort that reports an error."""
    if reason is None:
        return None
    kind = reason["type"] if isinstance(reason, Mapping) else reason
    if kind == "abort":
        status = reason.get("status_code") if isinstance(reason, Mapping) else None
        if status is not None and status >= _BAD_REQUEST:
            message = f"the engine aborted the request: {reason.get('message')}"
            raise EngineFailed(message) if status >= _SERVER_ERROR else InvalidRequest(message)
        return FinishReason.ABORT
    return FinishReason.LENGTH if kind == "length" else FinishReason.STOP


def _ranked(top: Sequence[Sequence[Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((entry[1], entry[0]) for entry in top)


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, Mapping) else str(error)
