"""An agent that shows a drawn shape and asks what it is, and the check of the answer. It uses the stock OpenAI SDK.

Each shape, a ring or a cross, is drawn anew: place, size, colour and line differ. The reward can be verified: an answer
is right if it begins with a vowel for a ring and with a consonant for a cross. Who does not look is right in half of
the cases at most. Which letters are meant, the model learns from its rewards alone.
"""

from __future__ import annotations

import base64
import io
import random
import ssl
from collections.abc import Mapping
from typing import Any

from letters_agent import is_right
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from PIL import Image, ImageDraw

KINDS = {"ring": "vowel", "cross": "consonant"}
QUESTION = "A ring or a cross?"
CERTIFICATES = ssl.create_default_context()
"""Read once: it takes each client longer than an answer of a tiny model."""
SIDE = 28
"""Pixels. A tiny model of the Qwen2.5-VL kind makes one token of such a picture."""


def draw(shape: str, seed: int) -> bytes:
    """Draw a shape as PNG: of equal arguments, equal bytes."""
    dice = random.Random(f"{shape} {seed}")
    picture = Image.new("RGB", (SIDE, SIDE), (250, 250, 250))
    radius = dice.uniform(0.28, 0.42) * SIDE
    across, down = (dice.uniform(radius, SIDE - radius) for _ in range(2))
    box = (across - radius, down - radius, across + radius, down + radius)
    pen: dict[str, Any] = {"fill": tuple(dice.randrange(130) for _ in range(3)), "width": int(radius / 3) + 1}
    canvas = ImageDraw.Draw(picture)
    if shape == "ring":
        canvas.ellipse(box, outline=pen["fill"], width=pen["width"])
    else:
        canvas.line(box, **pen)
        canvas.line((box[0], box[3], box[2], box[1]), **pen)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


async def look(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
    """Show the shape that `data` names (`shape`, `seed`); return 1.0 if the answer is right, else 0.0.

    `data["temperature"]`, 1 if it is not given: of the model's answer.
    """
    picture = base64.b64encode(draw(data["shape"], data["seed"])).decode()
    content: list[Any] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "text", "text": QUESTION},
    ]
    http = DefaultAsyncHttpxClient(verify=CERTIFICATES)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as openai:
        reply = await openai.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": content}],
            max_tokens=1,
            temperature=data.get("temperature", 1.0),
        )
    return float(is_right(reply.choices[0].message.content or "", KINDS[data["shape"]]))
