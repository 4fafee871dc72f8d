"""Reasoning formats: how models mark their reasoning, under the parser names of SGLang, vLLM, verl and ROLL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokengrove.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around the reasoning at the start of an answer.

    `label`: text after the opener that is not part of the reasoning. `hidden`: further markers that are not text.
    `forced`: an answer begins inside reasoning even if the prompt did not open it, unless the prompt closed it.
    `channels`: an answer is a sequence of messages in channels (harmony); `opener` begins a reasoning message.
    """

    opener: str
    closer: str
    label: str = ""
    hidden: tuple[str, ...] = ()
    forced: bool = False
    channels: bool = False


_THINK = ReasoningFormat("<think>", "</think>")
_ALWAYS = ReasoningFormat("<think>", "</think>", forced=True)
_HARMONY = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>", channels=True)
_COHERE = ReasoningFormat(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    hidden=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": _THINK,
    "qwen3": _THINK,
    "deepseek-v3": _THINK,
    "deepseek_v3": _THINK,
    "deepseek-v4": _THINK,
    "glm45": _THINK,
    "kimi_k2": _THINK,
    "minimax": _THINK,
    "minimax_m2": _THINK,
    "nemotron_3": _THINK,
    "nemotron_v3": _THINK,
    "mimo": _THINK,
    "dots": _THINK,
    "nanbeige": _THINK,
    "interns1": _THINK,
    "holo2": _THINK,
    "qwen3-thinking": _ALWAYS,
    "deepseek-r1": _ALWAYS,
    "deepseek_r1": _ALWAYS,
    "step3": _ALWAYS,
    "step3p5": _ALWAYS,
    "gpt-oss": _HARMONY,
    "gptoss": _HARMONY,
    "openai_gptoss": _HARMONY,
    "kimi": ReasoningFormat("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "minimax-m3": ReasoningFormat("<mm:think>", "</mm:think>"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "gemma4": ReasoningFormat("<|channel>", "<channel|>", label="thought\n"),
    "cohere": _COHERE,
    "cohere_command4": _COHERE,
}


def reasoning_format(name: str) -> ReasoningFormat | None:
    """Return the format of this name; None for `none`: reasoning stays text.

    Raises ConfigurationError listing the known names.
    """
    if name == "none":
        return None
    if name not in REASONING_FORMATS:
        raise ConfigurationError(f"--reasoning-parser {name} is not one of {', '.join(REASONING_FORMATS)}, none")
    return REASONING_FORMATS[name]
