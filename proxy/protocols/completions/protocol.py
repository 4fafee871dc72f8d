"""Parses OpenAI completion requests: prompts as texts or token ids, which are sent to the engine unchanged.

honoured  model prompt stream stream_options.include_usage max_tokens stop temperature top_p seed presence_penalty
          frequency_penalty logit_bias n logprobs echo, and vLLM's extensions top_k min_p repetition_penalty min_tokens
          stop_token_ids add_special_tokens response_format return_token_ids return_tokens_as_token_ids and
          structured_outputs, regex, ebnf (`answer_format`)
ignored   user, and every field not named here (recorded as dropped)
refused   suffix, best_of above n, prompt_logprobs (`echo` with `logprobs` has them), streams of several prompts, and
          vLLM's former guided_* fields
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.parsed_items import ParsedBodies
from proxy.protocols.answer_format import FORMAT_FIELDS, FORMER_FIELDS, parse_answer_format, parse_response_format
from proxy.protocols.common_fields import ignored_fields, parse_include_usage, parse_model
from proxy.protocols.completions.reply import ECHO, CompletionStream, completion_json
from proxy.protocols.fields import expect_object, json_type, optional_bool, optional_int, parse_token_ids
from proxy.protocols.sampling_params import parse_sampling, sampling_json
from proxy.protocols.wire_protocol import Answer, ordered_hex
from proxy.types import Api, Ids, PromptText, SamplingParams, TurnRequest
from tokengrove.errors import InvalidRequest, UnsupportedParameter

HONOURED = frozenset(
    {
        *("model", "prompt", "stream", "stream_options", "max_tokens", "stop", "temperature", "top_p", "seed", "n"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "echo", "top_k", "min_p", "min_tokens"),
        *("repetition_penalty", "stop_token_ids", "add_special_tokens", "response_format", "return_token_ids"),
        *("return_tokens_as_token_ids", "include_stop_str_in_output"),
        *FORMAT_FIELDS,
    }
)
IGNORED = frozenset({"user"})
REFUSED = frozenset({"suffix", "best_of", "prompt_logprobs"}) | FORMER_FIELDS
_DEFAULT_MAX_TOKENS = 16
_MAX_CHOICES = 128
_MAX_TOP_LOGPROBS = 20
_MAX_PROMPTS = 256


class CompletionsProtocol:
    """OpenAI completions, `/v1/completions`.

    The text of a prompt of ids, for `echo`, is added once its route, and so its tokenizer, is known.
    """

    api = Api.COMPLETIONS

    def new_id(self) -> str:
        return "cmpl-" + ordered_hex()

    def parse(self, body: Any, bodies: ParsedBodies | None = None) -> TurnRequest:
        body = expect_object(body, "body")
        logprobs = _parse_logprobs(body)
        echo = optional_bool(body, "echo")
        number = optional_int(body, "n", least=1, most=_MAX_CHOICES) or 1
        _refuse_unsupported(body, number)
        sampling = parse_sampling(body)
        prompt, *further = _parse_prompts(body)
        return_token_ids = optional_bool(body, "return_token_ids")
        return TurnRequest(
            api=Api.COMPLETIONS,
            model=parse_model(body),
            messages=(),
            sampling=SamplingParams(**{"max_tokens": _DEFAULT_MAX_TOKENS} | sampling),
            given=frozenset(sampling),
            stream=optional_bool(body, "stream"),
            include_usage=parse_include_usage(body),
            logprobs=logprobs is not None,
            top_logprobs=logprobs or 0,
            n=number,
            response_format=parse_answer_format(
                body, parse_response_format(body.get("response_format"), "response_format")
            ),
            dropped=tuple(ignored_fields(body, HONOURED | REFUSED)),
            **prompt_fields(prompt, echo=echo),
            further_prompts=tuple(further),
            score_prompt=echo and logprobs is not None,
            return_token_ids=return_token_ids,
            per_token=return_token_ids or logprobs is not None,
            names_ids=optional_bool(body, "return_tokens_as_token_ids") and logprobs is not None,
        )

    def body(self, request: TurnRequest) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "stream": request.stream,
            "stream_options": {"include_usage": True} if request.include_usage else None,
            "echo": ECHO in request.echo,
            "return_token_ids": request.return_token_ids,
            "return_tokens_as_token_ids": request.names_ids,
        }
        return {
            "model": request.model,
            "prompt": [] if request.input_ids is None else request.input_ids.tolist(),
            **sampling_json(request.sampling, request.given),
            **({"logprobs": request.top_logprobs} if request.logprobs else {}),
            **{name: value for name, value in fields.items() if value},
        }

    def reply(self, request: TurnRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        return completion_json(request, answers)

    def stream(
        self, request: TurnRequest, reply_id: str, created: int, prompt_tokens: int, prompt_ids: Ids | None = None
    ) -> CompletionStream:
        return CompletionStream(request, reply_id, created, prompt_ids)


def prompt_fields(prompt: Ids | PromptText, *, echo: bool) -> dict[str, Any]:
    """Return the fields of a TurnRequest for a prompt, which the reply repeats if `echo` is set."""
    if isinstance(prompt, PromptText):
        return {"input_ids": None, "text": prompt, "echo": {ECHO: prompt.text} if echo else {}}
    return {"input_ids": prompt, "text": None, "echo": {ECHO: None} if echo else {}}


def _parse_prompts(body: Mapping[str, Any]) -> list[Ids | PromptText]:
    """Return the prompts of `prompt`: token ids, a text, or a list of such prompts."""
    prompt = body.get("prompt")
    if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)):
        return [_parse_prompt(body, prompt, "prompt")]
    if len(prompt) > _MAX_PROMPTS:
        raise InvalidRequest(f"'prompt' must have at most {_MAX_PROMPTS} prompts, not {len(prompt)}", param="prompt")
    if len(prompt) > 1 and optional_bool(body, "stream"):
        raise UnsupportedParameter(
            f"'prompt' has {len(prompt)} prompts, which cannot be streamed; leave 'stream' out or send each alone",
            param="stream",
        )
    names = [f"prompt[{index}]" for index in range(len(prompt))] if len(prompt) > 1 else ["prompt"]
    return [_parse_prompt(body, each, name) for each, name in zip(prompt, names, strict=True)]


def _parse_prompt(body: Mapping[str, Any], prompt: Any, name: str) -> Ids | PromptText:
    if isinstance(prompt, list):
        return parse_token_ids(prompt, name)
    if isinstance(prompt, str):
        return PromptText(prompt, optional_bool(body, "add_special_tokens", True))
    shown = "missing" if prompt is None else f"{json_type(prompt)}; give a text or a list of token ids"
    raise InvalidRequest(f"'{name}' is {shown}", param=name)


def _parse_logprobs(body: Mapping[str, Any]) -> int | None:
    """Return the number of alternatives per token, None without logprobs. `true` is vLLM's spelling for chats."""
    value = body.get("logprobs")
    if isinstance(value, bool):
        return 0 if value else None
    return optional_int(body, "logprobs", least=0, most=_MAX_TOP_LOGPROBS)


def _refuse_unsupported(body: Mapping[str, Any], number: int) -> None:
    if body.get("prompt_logprobs") is not None:
        message = "'prompt_logprobs' is not supported by this server; 'echo' with 'logprobs' has those of the prompt"
        raise UnsupportedParameter(message, param="prompt_logprobs")
    if body.get("suffix"):
        raise UnsupportedParameter("'suffix' is not supported by this server; leave it out", param="suffix")
    if (optional_int(body, "best_of", least=1) or number) != number:
        message = f"'best_of' must be 'n' ({number}): every choice is recorded, and can be compared later"
        raise UnsupportedParameter(message, param="best_of")
