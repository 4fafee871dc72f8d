"""Messages with the number of tokens that stand for each of their images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.trajectory.conversation import message_dict
from proxy.types import Message, PlacedImage


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
