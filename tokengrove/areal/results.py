"""The complete turns of a session as interactions.

One export in layout concat contains each token once, and the position of each turn in its path. The session's tree
contains the logprobs of untrained tokens, the times and the replies. The tokens of an interaction are a slice of its
path, so they are exactly those of layout individual.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from tokengrove.areal.interaction import InteractionWithTokenLogpReward
from tokengrove.areal.model_response import ModelResponse
from tokengrove.client import Export, Sample, SessionTree, TreeNode
from tokengrove.client.adapters import areal, vision
from tokengrove.client.adapters.replay import OnMissing
from tokengrove.reasons import LogprobsOf

Interactions = dict[str, InteractionWithTokenLogpReward]
INCLUDE = ("logprobs", "reply", "times")
"""The parts of the tree that `individual` and `concat` need."""
_STOPPED = {"stop_string": "stop", "content_filter": "stop"}
"""AReaL's stop reasons for finish reasons that it does not have."""


def individual(export: Export, tree: SessionTree, on_missing: OnMissing = "refuse") -> Interactions:
    """All turns by id, in order of completion. `export`: in layout concat, with messages. `tree`: with `INCLUDE`.

    Raises InvalidRequest if the session recorded experts and a turn lacks a row; with `on_missing` leave_out, the turn
    has no experts.
    """
    nodes = {node.id: node for node in tree.interactions}
    found: Interactions = {}
    for sample in export.samples:
        for interaction in _turns(sample, nodes, export.images, on_missing):
            _add(found, interaction)
    for name, interaction in found.items():
        interaction.parent = found.get(nodes[name].parent_id or "")
    return {name: found[name] for name in nodes if name in found}


def concat(export: Export, tree: SessionTree, on_missing: OnMissing = "refuse") -> Interactions:
    """The last turn of each sample, with the tensors and the reward of the whole sample. Raises as `individual`."""
    every, entries = individual(export, tree, on_missing), areal.interactions(export.samples)
    for name, entry in entries.items():
        leaf = every[name]
        leaf.chat_template_type, leaf.reward, leaf._cache = "concat", entry["reward"], entry["tensor_dict"]
    return {name: leaf for name, leaf in every.items() if name in entries}


def _add(found: Interactions, interaction: InteractionWithTokenLogpReward) -> None:
    """Add a turn. A turn that several samples share is trained in one of them: the masks are combined."""
    name = interaction.interaction_id
    assert name is not None
    if (known := found.setdefault(name, interaction)) is not interaction:
        masks = zip(known.output_mask or (), interaction.output_mask or (), strict=True)
        known.output_mask = [one | other for one, other in masks]


def _turns(
    sample: Sample, nodes: Mapping[str, TreeNode], images: vision.Images, on_missing: OnMissing
) -> Iterator[InteractionWithTokenLogpReward]:
    ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
    told: list[dict[str, Any]] = []
    for turn in sample.turns:
        node, (start, end) = nodes[turn["interaction_id"]], turn["span"]
        *asked, answer = turn["messages"]
        messages = told + asked
        interaction = InteractionWithTokenLogpReward(
            model_response=_model_response(node, ids[:start], ids[start:end]),
            reward=turn["return"],
            messages=messages,
            output_message_list=[answer],
            _interaction_id=node.id,
            original_reward=turn["reward"],
            session_id=sample.session_id,
            reply=node.reply,
            output_mask=mask[start:end],
            **_media(sample, start),
        )
        if interaction.model_response is not None:
            interaction.model_response.routed_experts = areal.routed_experts(sample, end, on_missing)
        if interaction.image_spans and interaction.model_response is not None:
            interaction.model_response.input_images = vision.base64_of(sample, images, start)
        if node.api == "responses" and node.reply is not None:
            interaction.response = response(node.reply)
        else:
            chat = node.reply if node.api == "chat" and node.reply is not None else _as_chat(node, answer)
            interaction.completion = chat_completion(chat)
        yield interaction
        told = [*messages, answer]


def _media(sample: Sample, end: int) -> dict[str, Any]:
    """The fields of the images before token `end`; empty unless the model is a vision model."""
    if not vision.has_vision([sample]):
        return {}
    spans = [(image["start"], image["length"]) for image in sample.images if image["start"] < end]
    return {"multi_modal_input": vision.arrays_before(sample, end), "image_spans": spans}


def _model_response(node: TreeNode, input_tokens: list[int], output_tokens: list[int]) -> ModelResponse:
    times = node.times or {}
    began, first, ended = (times.get(name) for name in ("created_at", "first_token_at", "completed_at"))
    return ModelResponse(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        output_logprobs=list(node.logprobs or [0.0] * len(output_tokens)),
        output_versions=[version for count, version in node.versions for _ in range(count)],
        stop_reason=_stop_reason(node),
        logprobs_of=str(node.notes.get("logprobs_of", LogprobsOf.RULE)),
        latency=_seconds(began, ended),
        ttft=_seconds(began, first),
    )


def _stop_reason(node: TreeNode) -> str:
    reason = node.finish_reason or "stop"
    return _STOPPED.get(reason, reason)


def _seconds(began: float | None, ended: float | None) -> float:
    return float("inf") if began is None or ended is None else ended - began


def _as_chat(node: TreeNode, answer: Mapping[str, Any]) -> dict[str, Any]:
    """The reply of a turn of another API in the format of a chat completion."""
    return {
        "id": node.id,
        "object": "chat.completion",
        "created": int((node.times or {}).get("completed_at") or 0),
        "model": node.model,
        "choices": [{"index": 0, "message": dict(answer), "finish_reason": _stop_reason(node), "logprobs": None}],
        "usage": {
            "prompt_tokens": node.prompt_tokens,
            "completion_tokens": node.output_tokens,
            "total_tokens": node.prompt_tokens + node.output_tokens,
        },
    }


Json = Any


class Reply(SimpleNamespace):
    """An object with the attributes of OpenAI's types; `model_dump` returns its JSON."""

    def model_dump(self) -> dict[str, Json]:
        """The fields as dicts and lists."""
        dumped: dict[str, Json] = _dumped(self)
        return dumped


def chat_completion(reply: Mapping[str, Json]) -> Any:
    """The body of a chat completion as OpenAI's `ChatCompletion`, or a `Reply`."""
    try:
        from openai.types.chat import ChatCompletion
    except ModuleNotFoundError:
        return _shaped(reply)
    return ChatCompletion.construct(**reply)


def response(reply: Mapping[str, Json]) -> Any:
    """The body of a response as OpenAI's `Response`, or a `Reply`."""
    try:
        from openai.types.responses import Response
    except ModuleNotFoundError:
        return _shaped(reply)
    return Response.construct(**reply)


def _shaped(value: Json) -> Any:
    if isinstance(value, Mapping):
        return Reply(**{name: _shaped(of) for name, of in value.items()})
    return [_shaped(item) for item in value] if isinstance(value, list) else value


def _dumped(value: Any) -> Json:
    if isinstance(value, Reply):
        return {name: _dumped(of) for name, of in vars(value).items()}
    return [_dumped(item) for item in value] if isinstance(value, list) else value
