"""The images in the prompt of a node, and the tokens that stand for them: its own and those of the turns above it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.trajectory.conversation import message_dict
from proxy.trajectory.tree import Linked
from proxy.types import Message, PlacedImage


def placed_images(node: Linked) -> tuple[PlacedImage, ...]:
    """All images of the node's whole prompt, in order. A prompt that was rendered anew has all of its own."""
    parts: list[tuple[PlacedImage, ...]] = []
    current: Linked | None = node
    while current is not None:
        parts.append(current.interaction.images)
        current = current.parent if current.interaction.aligned else None
    return tuple([image for part in reversed(parts) for image in part])


def with_tokens(messages: Sequence[Message], placed: Sequence[PlacedImage]) -> list[dict[str, Any]]:
    """The messages as `message_dict` has them; each image has the number of its `tokens`.

    `placed`: the images of a prompt that ends with these messages. Without numbers if they are not those of the
    messages: a template may leave out old ones.
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
