"""An agent that asks for vowels and consonants, and the check of its answers. It uses the stock OpenAI SDK alone.

The reward can be verified: an answer is right if it begins with a letter of the kind that was asked for. A model with
random weights is right by chance; one that always says the same gets half of the reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

QUESTIONS = {"vowel": "Say a vowel.", "consonant": "Say a consonant."}
OTHER = {"vowel": "consonant", "consonant": "vowel"}


async def ask(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
    """Ask for a letter of kind `data["first"]`, then for one of the other; return the share of right answers.

    `data["sampling"]`: sampling parameters beside the defaults, such as `top_p`, also those that the SDK does not know.
    """
    kinds = data["first"], OTHER[data["first"]]
    messages: list[Any] = []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as openai:
        for kind in kinds:
            messages.append({"role": "user", "content": QUESTIONS[kind]})
            reply = await openai.chat.completions.create(
                model="any", messages=messages, max_tokens=2, extra_body=data.get("sampling")
            )
            messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    return sum(map(is_right, answers, kinds)) / len(kinds)


def is_right(answer: str, kind: str) -> bool:
    """Whether an answer begins with a letter of this kind."""
    first = answer.strip()[:1].lower()
    return first.isascii() and first.isalpha() and (first in "aeiou") == (kind == "vowel")
