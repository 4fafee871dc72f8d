"""The conversation of a node, and its messages and tools in the form of the OpenAI chat API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.trajectory.tree import Linked
from proxy.types import Message, PlacedImage, Tool


def conversation(node: Linked) -> tuple[Message, ...]:
    """All messages of a node, oldest first, its answer included."""
    return (*conversation_above(node), *node.interaction.new_messages, node.interaction.output)


def conversation_above(node: Linked) -> tuple[Message, ...]:
    """All messages before a node's own, oldest first: the messages and answers of its ancestors."""
    parts: list[tuple[Message, ...]] = []
    above = node.parent
    while above is not None:
        parts.append((*above.interaction.new_messages, above.interaction.output))
        above = above.parent
    return tuple(message for part in reversed(parts) for message in part)


def root(node: Linked) -> Linked:
    """The root above a node, or the node itself. It stores what the whole conversation shares."""
    while node.parent is not None:
        node = node.parent
    return node


def tool_dict(tool: Tool) -> dict[str, Any]:
    """One tool in the form of the OpenAI chat API."""
    return {"type": "function", "function": tool.to_json()}


def message_dict(message: Message) -> dict[str, Any]:
    """One message as a dict of the fields that are set. Arguments are the sampled text."""
    out: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    for name, value in (("tool_call_id", message.tool_call_id), ("name", message.name)):
        if value is not None:
            out[name] = value
    if message.images:
        out["images"] = [image.to_json() for image in message.images]
    return out


def with_tokens(messages: Sequence[Message], placed: Sequence[PlacedImage]) -> list[dict[str, Any]]:
    """The messages in the form of `message_dict`, with the number of `tokens` of each image.

    `placed`: the images of a prompt that ends with these messages. The numbers are left out if these images are not
    those of the messages: a template may leave out old images.
    """
    shown = [message_dict(message) for message in messages]
    if not placed:
        return shown
    images = [image for message in shown for image in message.get("images", ())]
    own = placed[-len(images) :] if images else ()
    if [image["digest"] for image in images] == [image.digest for image in own]:
        for image, found in zip(images, own, strict=True):
            image["tokens"] = found.length
    return shown
