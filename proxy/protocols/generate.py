"""`/v1/generate`: token ids in, token ids out, for trainers that run their own loop. No chat template, no parsing.

The `output_ids`, `logprobs` and `versions` of a reply have the same length. `logprobs` is null only for a mailbox
answer without logprobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.parsed_items import ParsedBodies
from proxy.protocols.common_fields import ignored_fields
from proxy.protocols.fields import (
    expect_bool,
    expect_object,
    optional_int,
    optional_object,
    optional_text,
    parse_token_ids,
)
from proxy.protocols.sampling_params import parse_sampling, sampling_json
from proxy.protocols.wire_protocol import Answer, StreamEncoder, ordered_hex
from proxy.types import Api, Ids, ImagePart, Interaction, SamplingParams, TurnRequest, VersionRuns
from tokengrove.errors import InvalidRequest, UnsupportedParameter
from tokengrove.reasons import FinishReason, LogprobsOf

_AT = "sampling_params."
_ALIASES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_UNSUPPORTED = ("text", "stream", "json_schema", "regex", "ebnf", "structural_tag", "lora_path")
_HONOURED = frozenset(
    {"model", "input_ids", "prompt_ids", "sampling_params", "request_id", "n", "image_data", *_UNSUPPORTED}
)
_HONOURED_PARAMS = frozenset({*SamplingParams._fields, *_ALIASES, "max_completion_tokens", "n", *_UNSUPPORTED})
_FINISH = {FinishReason.LENGTH: "length", FinishReason.ABORT: "abort", FinishReason.CONTENT_FILTER: "content_filter"}


class GenerateProtocol:
    """Token-level generation, `/v1/generate`."""

    api = Api.GENERATE

    def new_id(self) -> str:
        return "gen-" + ordered_hex()

    def parse(self, body: Any, bodies: ParsedBodies | None = None) -> TurnRequest:
        body = expect_object(body, "body")
        params = optional_object(body, "sampling_params")
        _refuse_unsupported(body, params)
        given = _by_own_names(params)
        sampling = parse_sampling(given, _AT)
        if given.get("ignore_eos") is not None:
            sampling["ignore_eos"] = expect_bool(given["ignore_eos"], _AT + "ignore_eos")
        return TurnRequest(
            api=Api.GENERATE,
            model=optional_text(body, "model") or "",
            messages=(),
            sampling=SamplingParams(**sampling),
            given=frozenset(sampling),
            input_ids=_parse_ids(body),
            images=_parse_images(body),
            dropped=(
                *ignored_fields(body, _HONOURED),
                *(_AT + name for name in ignored_fields(params, _HONOURED_PARAMS)),
            ),
        )

    def body(self, request: TurnRequest) -> dict[str, Any]:
        return {
            "model": request.model,
            "input_ids": [] if request.input_ids is None else request.input_ids.tolist(),
            **({"image_data": list(request.images)} if request.images else {}),
            "sampling_params": sampling_json(request.sampling, request.given),
        }

    def reply(self, request: TurnRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        interaction = answers[0].interaction
        return {"id": interaction.id, **interaction_reply(interaction)}

    def stream(
        self, request: TurnRequest, reply_id: str, created: int, prompt_tokens: int, prompt_ids: Ids | None = None
    ) -> StreamEncoder:
        """Raise UnsupportedParameter. Unreachable: `parse` already refuses `stream`."""
        raise UnsupportedParameter("'stream' is not supported here", param="stream")


def prompt_field(body: Mapping[str, Any]) -> str:
    """Return the name of the field that holds the prompt: `prompt_ids` or `input_ids`."""
    return "prompt_ids" if body.get("prompt_ids") is not None else "input_ids"


def parse_request_id(body: Mapping[str, Any]) -> str | None:
    """Return `request_id`, which groups requests that have no session."""
    return optional_text(body, "request_id")


def interaction_reply(interaction: Interaction) -> dict[str, Any]:
    """Return the reply to a recorded generation, without its id."""
    return generation_reply(
        interaction.output_ids,
        interaction.logprobs if interaction.has_logprobs else None,
        interaction.versions,
        interaction.finish_reason,
        interaction.prompt_tokens,
        interaction.cached_tokens,
        interaction.logprobs_of,
    )


def generation_reply(
    ids: Ids,
    logprobs: Sequence[float] | None,
    versions: VersionRuns,
    finish: FinishReason | None,
    prompt_tokens: int,
    cached_tokens: int | None,
    logprobs_of: LogprobsOf,
) -> dict[str, Any]:
    """Return the reply: `output_ids`, `logprobs` and `versions` (one weight version per token) of equal length.

    `logprobs` is null if they are unknown. `logprobs_of`: the distribution that they are of.
    """
    return {
        "output_ids": ids.tolist(),
        "logprobs": None if logprobs is None else list(logprobs),
        "logprobs_of": logprobs_of,
        "versions": [version for count, version in versions for _ in range(count)],
        "finish_reason": None if finish is None else _FINISH.get(finish, "stop"),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens or 0,
    }


def _refuse_unsupported(body: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name in _UNSUPPORTED:
        if body.get(name) or given.get(name):
            field = name if body.get(name) else _AT + name
            raise UnsupportedParameter(f"'{field}' is not supported by /v1/generate; leave it out", param=field)
    for fields, at in ((body, ""), (given, _AT)):
        if (optional_int(fields, "n", least=1, at=at) or 1) != 1:
            raise UnsupportedParameter(f"'{at}n' must be 1; send one request per sample", param=f"{at}n")


def _parse_images(body: Mapping[str, Any]) -> tuple[ImagePart, ...]:
    """Return the images of the prompt's image tokens, in their order."""
    images = body.get("image_data")
    if not images:
        return ()
    if not isinstance(images, list) or not all(isinstance(image, ImagePart) for image in images):
        raise UnsupportedParameter("'image_data' is not supported: this model accepts text only", param="image_data")
    return tuple(images)


def _by_own_names(params: Mapping[str, Any]) -> dict[str, Any]:
    """Replace SGLang's names in `sampling_params` with ours. Errors name a field as the client wrote it."""
    optional_int(params, "max_new_tokens", least=1, at=_AT)
    optional_int(params, "min_new_tokens", least=0, at=_AT)
    optional_int(params, "sampling_seed", least=-(2**63), most=2**63 - 1, at=_AT)
    for name, own in _ALIASES.items():
        if params.get(name) is not None and params.get(own) is not None:
            raise InvalidRequest(f"give '{_AT}{name}' or '{_AT}{own}', not both", param=_AT + name)
    return {_ALIASES.get(name, name): value for name, value in params.items() if value is not None}


def _parse_ids(body: Mapping[str, Any]) -> Ids:
    names = [name for name in ("input_ids", "prompt_ids") if body.get(name) is not None]
    if len(names) != 1:
        raise InvalidRequest("give either 'input_ids' or 'prompt_ids': the token ids of one prompt", param="input_ids")
    return parse_token_ids(body[names[0]], names[0])
