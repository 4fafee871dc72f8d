"""The known model families: their `model_type` in `config.json`, their chat templates and tool-call formats.

A family only determines what is tried first. The folder's own chat template decides: a call format is used only if it
reads back a call that the template wrote (choose_formats). A renderer of the `renderers` package replaces the chat
template only if the folder has none (choose_template).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokengrove.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    `holds` and `lacks`: texts that its chat template contains and does not contain. `library`: names of renderers in
    the `renderers` package, in the order to try them. `ends`: tokens that end a turn, in addition to the folder's own.
    `tool_format`: a name in tool_calls.known_formats. `reasoning`: a name in reasoning_formats.
    """

    name: str
    model_types: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    library: tuple[str, ...] = ()
    tool_format: str | None = None
    reasoning: str | None = None
    ends: tuple[str, ...] = ()

    def knows(self, source: str) -> bool:
        """Return whether the chat template `source` looks like this family's. False for a family without `holds`."""
        fits = bool(self.holds) and all(text in source for text in self.holds)
        return fits and not any(text in source for text in self.lacks)


_IM = "<|im_start|>"
_DEEPSEEK = "<\uff5cAssistant\uff5c>"
_IM_ENDS = ("<|im_end|>", "<|endoftext|>")
_LLAMA_ENDS = ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")
_GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_QWEN3 = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe")
_QWEN3_5 = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_6", "qwen3_6_moe")
_GLM_5 = ("glm4_moe_lite", "glm_moe_dsa", "glm5", "glm5_moe")
_DEEPSEEK_3 = ("deepseek_v3", "deepseek_v2", "deepseek_v32")

# If two families fit, the first one counts. gpt-oss does not use the `renderers` package, because its renderer there
# downloads a vocabulary.
FAMILIES = (
    Family("qwen3", _QWEN3, (_IM, "</think>"), ("<function=",), ("qwen3",), "hermes", "qwen3", _IM_ENDS),
    Family("qwen3-coder", _QWEN3, (_IM, "<function="), ("</think>",), (), "qwen3_coder"),
    Family("qwen3-instruct", _QWEN3, (_IM, "<tool_call>"), ("</think>", "<function="), (), "hermes"),
    Family(
        "qwen3.8",
        ("qwen3_8", "qwen3_8_text", "qwen3_8_moe", "qwen3_8_moe_text"),
        (_IM, "<function=", "</think>", "Reasoning effort is set to"),
        library=("qwen3.8",),
        tool_format="qwen3_coder",
        reasoning="qwen3",
        ends=_IM_ENDS,
    ),
    Family(
        "nemotron-3",
        ("nemotron_h", "nemotron_h_moe", "nemotron3"),
        (_IM, "<function=", "truncate_history_thinking"),
        library=("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
        tool_format="qwen3_coder",
        reasoning="qwen3",
        ends=_IM_ENDS,
    ),
    Family(
        "qwen3.5",
        _QWEN3_5,
        (_IM, "<function=", "</think>"),
        (),
        ("qwen3.5", "qwen3.6"),
        "qwen3_coder",
        "qwen3",
        _IM_ENDS,
    ),
    Family("qwen2.5", ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl"), (_IM, "<tool_call>"), (), (), "hermes"),
    Family("llama-3", ("llama", "mllama"), ("<|start_header_id|>",), (), ("llama-3",), "llama3", ends=_LLAMA_ENDS),
    Family("llama-4", ("llama4", "llama4_text"), ("<|header_start|>",), tool_format="pythonic"),
    Family(
        "mistral",
        ("mistral", "mistral3", "ministral", "ministral3", "mixtral", "pixtral"),
        ("[INST]",),
        tool_format="mistral",
        reasoning="mistral",
    ),
    Family("phi-4", ("phi3", "phi4mm"), ("<|im_sep|>",)),
    Family("phi-3", ("phi3", "phi", "phimoe", "phi4mm"), ("<|assistant|>", "<|end|>"), ("<|observation|>",)),
    Family("gemma-4", ("gemma4", "gemma4_text"), ("<|turn>",), (), ("gemma4",), "gemma4", "gemma4"),
    Family("gemma", ("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text"), ("<start_of_turn>",)),
    Family(
        "glm-5",
        _GLM_5,
        ("<|observation|>", "<arg_key>"),
        (),
        ("glm-5", "glm-5.1", "glm-5.3"),
        "glm47",
        "glm45",
        _GLM_ENDS,
    ),
    Family("glm-4.5", ("glm4_moe", "glm4v_moe"), ("<|observation|>",), (), ("glm-4.5",), "glm45", "glm45", _GLM_ENDS),
    Family(
        "deepseek-r1",
        _DEEPSEEK_3,
        (f"{_DEEPSEEK}<think>",),
        library=("deepseek-r1",),
        tool_format="deepseekv3",
        reasoning="deepseek-r1",
    ),
    Family("deepseek-v3", _DEEPSEEK_3, (_DEEPSEEK, "```json"), (), ("deepseek-v3",), "deepseekv3"),
    Family("deepseek-v4", ("deepseek_v4",), (), (), ("deepseek-v4",), "deepseekv4", "deepseek-v3"),
    Family("deepseek-v3.1", _DEEPSEEK_3, (_DEEPSEEK,), ("```json",), (), "deepseekv31", "deepseek-v3"),
    Family(
        "kimi-k2",
        ("kimi_k2", "kimi_k25", "kimi_linear"),
        ("<|im_middle|>",),
        library=("kimi-k2", "kimi-k2.5"),
        tool_format="kimi_k2",
        reasoning="kimi_k2",
    ),
    Family("minimax-m2", ("minimax_m2", "minimax"), ("]~b]",), (), ("minimax-m2",), "minimax-m2", "minimax"),
    Family("gpt-oss", ("gpt_oss",), ("<|channel|>", "<|start|>"), tool_format="gpt-oss", reasoning="gpt-oss"),
    Family("cohere", ("cohere", "cohere2"), ("<|START_OF_TURN_TOKEN|>",)),
    Family("hunyuan", ("hunyuan_v1_dense", "hunyuan_v1_moe", "hy3"), (), (), ("hy3",)),
    Family("generic"),
)


def family_named(name: str) -> Family:
    """Return the family of this name. Raises ConfigurationError listing the known names."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise ConfigurationError(f"--family {name} is not one of {', '.join(family.name for family in FAMILIES)}")


def candidates(model_type: str | None, source: str) -> Iterator[Family]:
    """Yield families to try, best first: those matching type and template, then the template, then the type only.

    The last one is always "generic".
    """
    by_type = [family for family in FAMILIES if model_type in family.model_types]
    known = [family for family in FAMILIES if family.knows(source)]
    yield from dict.fromkeys([*(f for f in by_type if f in known), *known, *by_type, family_named("generic")])
