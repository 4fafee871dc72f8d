"""What a session sets for its turns becomes part of each request: template options, the format of tool calls, and its
sampling, where that wins over the request's."""

from __future__ import annotations

from proxy.types import SamplingParams, SessionRecord, TurnRequest
from tokengrove.options.start import SamplingPolicy

_SHAPING = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "min_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    }
)
"""The fields of SamplingParams that say how likely each token is, or which one is drawn. `min_tokens` is among them, as
it rules end tokens out."""
_NOTHING_GIVEN = SamplingParams()._asdict()


def follow_session(request: TurnRequest, record: SessionRecord) -> None:
    """Change a request as its session says.

    With the sampling policy `override`, every parameter that shapes the distribution is the session's or the default,
    `max_tokens` is at most the session's, and the session's template options win. What the client set without effect is
    named in `dropped`. Otherwise the session's template options are those that the request leaves out.
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
