"""How models mark their reasoning, by the names that SGLang, vLLM, verl and ROLL use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Markers around the reasoning with which an answer may begin.

    `label` is text that may follow the opener and is no reasoning. `hidden` are markers that are no text either.
    `forced`: an answer begins with reasoning even where the prompt does not open it, unless the prompt closed it.
    `channels`: the answer is a sequence of messages in channels (harmony), and `opener` begins one with reasoning.
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
    """None for `none`: reasoning is text. Raises ConfigurationError naming the known ones."""
    if name == "none":
        return None
    if name not in REASONING_FORMATS:
        raise ConfigurationError(f"--reasoning-parser {name} is not one of {', '.join(REASONING_FORMATS)}, none")
    return REASONING_FORMATS[name]
