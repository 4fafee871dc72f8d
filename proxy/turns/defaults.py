"""The defaults that a turn takes from its session, and the check that the engine supports the request.

A session sets sampling defaults, template options and the format of tool calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.engine.interface import Capability, EngineInfo
from proxy.rendering.renderer import Renderer
from proxy.side_columns.columns import ColumnRequest
from proxy.turns.prompts import FORCED, Prompt, held_tool
from proxy.types import Api, SamplingParams, SessionRecord, TurnRequest
from tokengrove.errors import InvalidRequest, UnsupportedParameter
from tokengrove.options.start import Replay, SamplingPolicy

_MOST_SEED = 2**63 - 1
_NO_PENALTIES = (0.0, 0.0, 1.0)
_EFFORT = "reasoning_effort"
# Where clients state the effort with every turn, in the levels of their provider's models.
_CLIENTS_EFFORT = {
    Api.MESSAGES: "output_config.effort",
    Api.GOOGLE: "generationConfig.thinkingConfig.thinkingLevel",
}


def with_defaults(request: TurnRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the request's sampling parameters; the session's `defaults` replace the fields that it does not set."""
    if not defaults:
        return request.sampling
    rest = {name: value for name, value in defaults.items() if name not in request.given}
    if isinstance(stop := rest.get("stop"), list):
        rest["stop"] = tuple(stop)  # stored as JSON, which has no tuples
    return request.sampling._replace(**rest) if rest else request.sampling


def sampling_of_choice(sampling: SamplingParams, k: int) -> SamplingParams:
    """Return the sampling parameters of choice `k`. Each choice has its own seed; otherwise all would be equal.

    Seeds are 64-bit integers, and the largest wraps around to the smallest.
    """
    if sampling.seed is None or k == 0:
        return sampling
    seed = sampling.seed + k
    return sampling._replace(seed=seed if seed <= _MOST_SEED else seed - 2**64)


def stop_tokens(request: TurnRequest, models: tuple[int, ...]) -> tuple[int, ...]:
    """Return the token ids that end the output.

    `models`: the end tokens of the model. The stop tokens of a request are added to them, or replace them in the
    generate API. With `ignore_eos` there are none.
    """
    sampling = request.sampling
    if sampling.ignore_eos:
        return ()
    if sampling.stop_token_ids is None:
        return models
    if request.api is Api.GENERATE:
        return sampling.stop_token_ids
    return (*models, *(token for token in sampling.stop_token_ids if token not in models))


def best_effort(sampling: SamplingParams, info: EngineInfo) -> tuple[str, ...]:
    """Return the sampling fields that the engine receives but does not guarantee to honour."""
    return ("seed",) if sampling.seed is not None and Capability.DETERMINISTIC not in info.capabilities else ()


def check_capabilities(request: TurnRequest, sampling: SamplingParams, info: EngineInfo, *, strict: bool) -> None:
    """Raise UnsupportedParameter for a field that the engine does not support.

    Raise InvalidRequest for an unknown token, or if `min_tokens` is above `max_tokens`. `strict`: fields that the
    engine takes only as best effort are not supported.
    """
    if strict:
        for name in best_effort(sampling, info):
            raise UnsupportedParameter(
                f"this engine takes '{name}' only as best effort, which --strict-sampling refuses; leave it out, or "
                "run SGLang with --enable-deterministic-inference",
                param=name,
            )
    for name, capability in _needs(request, sampling):
        if capability not in info.capabilities:
            raise UnsupportedParameter(f"this engine does not support '{name}'; leave it out", param=name)
    for token, _ in sampling.logit_bias:
        _check_token(token, "logit_bias", info)
    for token in sampling.stop_token_ids or ():
        _check_token(token, "stop_token_ids", info)
    if sampling.min_tokens:
        _check_minimum(request, sampling)


def _check_token(token: int, name: str, info: EngineInfo) -> None:
    if token >= info.vocab_size:
        message = f"'{name}' names token {token}, but token ids end at {info.vocab_size - 1}"
        raise InvalidRequest(message, param=name)


def _check_minimum(request: TurnRequest, sampling: SamplingParams) -> None:
    most = sampling.max_tokens
    if most is not None and sampling.min_tokens > most:
        message = f"'min_tokens' is {sampling.min_tokens}, above the {most} tokens that are allowed at most"
        raise InvalidRequest(message, param="min_tokens")
    if request.response_format is not None or request.tool_choice.mode in FORCED or held_tool(request) is not None:
        message = "'min_tokens' forbids the end token where a forced call or a format is complete; leave it out"
        raise UnsupportedParameter(message, param="min_tokens")


def _needs(request: TurnRequest, sampling: SamplingParams) -> list[tuple[str, Capability]]:
    """Return the fields that not every engine supports, each with the capability that it needs."""
    needs: list[tuple[str, Capability]] = []
    if request.tool_choice.mode in FORCED:
        needs.append(("tool_choice", Capability.GRAMMAR))
    if request.response_format is not None:
        needs.append((request.response_format.param, Capability.GRAMMAR))
    if request.tools and (held := held_tool(request)) is not None:
        needs.append((f"tools[{held}].format", Capability.GRAMMAR))
    if request.top_logprobs > 0:
        needs.append(("top_logprobs", Capability.TOP_LOGPROBS))
    if sampling.seed is not None:
        needs.append(("seed", Capability.SEED))
    if sampling.logit_bias:
        needs.append(("logit_bias", Capability.LOGIT_BIAS))
    if sampling.min_tokens:
        needs.append(("min_tokens", Capability.MIN_TOKENS))
    if (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != _NO_PENALTIES:
        needs.append(("presence_penalty", Capability.PENALTIES))
    return needs


_SHAPING = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "min_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    }
)
"""The fields of SamplingParams that determine the probabilities of tokens, or which token is drawn. `min_tokens` is one
of them because it excludes end tokens."""
_NOTHING_GIVEN = SamplingParams()._asdict()


def leave_out_effort(request: TurnRequest, renderer: Renderer) -> None:
    """Remove a client's reasoning effort that the chat template refuses, in place; `dropped` then names its field.

    Clients of these APIs state an effort unasked. In the other APIs, the template's error is the answer.
    """
    options, field = request.template_options, _CLIENTS_EFFORT.get(request.api)
    if field is None or _EFFORT not in options or renderer.knows_effort(options[_EFFORT]):
        return
    request.template_options = {name: value for name, value in options.items() if name != _EFFORT}
    request.dropped = (*request.dropped, field)


def follow_session(request: TurnRequest, record: SessionRecord) -> None:
    """Apply the turn options of a session to a request, in place.

    With the sampling policy `override`, every parameter that shapes the distribution has the session's value or the
    default, `max_tokens` is at most the session's, and the session's template options take precedence. `dropped` then
    names the fields of the request that have no effect. Without it, the request's template options take precedence.
    """
    if not record.turn_options:
        return
    wins = record.turn_options.get("sampling_policy") == SamplingPolicy.OVERRIDE
    request.tool_parser = record.turn_options.get("tool_parser")
    if record.turn_options.get("parallel_tool_calls") is False:
        request.parallel_tool_calls = False
    if wins:
        _take_sampling(request, record)
    options = record.turn_options.get("chat_template_kwargs")
    if options and request.input_ids is None and request.text is None:
        asked = request.template_options
        request.template_options = {**asked, **options} if wins else {**options, **asked}
        if any(request.template_options[name] != value for name, value in asked.items()):
            request.dropped = (*request.dropped, "chat_template_kwargs")


def _take_sampling(request: TurnRequest, record: SessionRecord) -> None:
    given, asked = request.given & _SHAPING, request.sampling
    without_effect = [
        name for name in sorted(given) if getattr(asked, name) != record.sampling.get(name, _NOTHING_GIVEN[name])
    ]
    request.sampling = asked._replace(**{name: _NOTHING_GIVEN[name] for name in given})
    request.given -= given
    most = record.sampling.get("max_tokens")
    if most is not None and asked.max_tokens is not None and asked.max_tokens > most:
        request.sampling = request.sampling._replace(max_tokens=most)
        without_effect.append("max_tokens")
    request.dropped = (*request.dropped, *without_effect)


def columns_of(record: SessionRecord, prompt: Prompt, info: EngineInfo) -> ColumnRequest | None:
    """The side columns that a turn records; None: none. Experts start at the first token without any in the session.

    The last token of the parent is the first: it has none before a forward pass takes it in.
    """
    asked = frozenset(map(Replay, record.turn_options.get("replay", ())))
    if info.dense:
        asked -= {Replay.EXPERTS}
    if not asked:
        return None
    parent = prompt.match.parent if prompt.bridged else None
    start = 0 if parent is None else max(parent.length - 1, 0)
    return ColumnRequest(asked, record.turn_options["max_kept"], start)
