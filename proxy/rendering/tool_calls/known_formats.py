"""The known tool-call formats, under the parser names of SGLang, vLLM, verl and ROLL. Add a format here."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.rendering.tool_calls.harmony_calls import HarmonyFormat
from proxy.rendering.tool_calls.json_calls import JsonFormat
from proxy.rendering.tool_calls.literal_calls import GemmaFormat, PythonFormat
from proxy.rendering.tool_calls.marked_calls import MarkedFormat, MistralFormat
from proxy.rendering.tool_calls.tagged_calls import PairFormat, TagFormat
from proxy.rendering.tool_calls.tool_format import ToolFormat
from tokengrove.errors import ConfigurationError

_HERMES = JsonFormat("hermes", "<tool_call>", "</tool_call>", arguments=("arguments",), separator="\n")
_LLAMA = JsonFormat(
    "llama3", "<|python_tag|>", "", arguments=("parameters", "arguments"), several=True, bare="{", head="", tail=""
)
_PYTHONIC = PythonFormat()
_CODER = TagFormat("qwen3_coder", "<tool_call>", "</tool_call>", lines=True)
_MINIMAX = TagFormat(
    "minimax-m2",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    call="<invoke name=",
    end_call="</invoke>",
    key="<parameter name=",
    quote='"',
)


def _dsml(name: str, block: str) -> TagFormat:
    sign = "\uff5cDSML\uff5c"
    return TagFormat(
        name,
        f"<{sign}{block}>",
        f"</{sign}{block}>",
        call=f"<{sign}invoke name=",
        end_call=f"</{sign}invoke>",
        key=f"<{sign}parameter name=",
        end_value=f"</{sign}parameter>",
        quote='"',
        typed=True,
    )


def _deepseek(name: str, *, fenced: bool) -> MarkedFormat:
    def mark(text: str) -> str:
        return f"<\uff5ctool\u2581{text}\uff5c>"

    return MarkedFormat(
        name,
        mark("calls\u2581begin"),
        mark("calls\u2581end"),
        mark("call\u2581begin"),
        mark("sep"),
        mark("call\u2581end"),
        head=r"(.*)",
        written=f"function{mark('sep')}{{name}}" if fenced else f"{{name}}{mark('sep')}",
        fenced=fenced,
    )


_DEEPSEEK_V3 = _deepseek("deepseekv3", fenced=True)
_DEEPSEEK_V31 = _deepseek("deepseekv31", fenced=False)
_KIMI = MarkedFormat(
    "kimi_k2",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    head=r"(?:[^.:]*\.)?([^:]+)(?::.*)?",
    written="functions.{name}:0<|tool_call_argument_begin|>",
)
_MISTRAL = MistralFormat()
_GLM = PairFormat()
_HARMONY = HarmonyFormat()
_COHERE = JsonFormat(
    "cohere",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    names=("tool_name",),
    arguments=("parameters",),
    several=True,
    head="[\n    ",
    tail="\n]",
)
_DSML_V4 = _dsml("deepseekv4", "tool_calls")
_SEED = TagFormat("seed_oss", "<seed:tool_call>", "</seed:tool_call>", lines=True)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "qwen3": _HERMES,
    "qwen2_5": _HERMES,
    "longcat": JsonFormat("longcat", "<longcat_tool_call>", "</longcat_tool_call>", separator="\n"),
    "qwen3_coder": _CODER,
    "qwen3_xml": _CODER,
    "mimo": _CODER,
    "nemotron": _CODER,
    "nemotron_3": _CODER,
    "step3p5": _CODER,
    "nanbeige": _CODER,
    "seed_oss": _SEED,
    "seed": _SEED,
    "glm": _GLM,
    "glm45": _GLM,
    "glm47": _GLM,
    "minimax-m2": _MINIMAX,
    "minimax_m2": _MINIMAX,
    "minimax": _MINIMAX,
    "deepseekv3": _DEEPSEEK_V3,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_r1": _DEEPSEEK_V3,
    "deepseekv31": _DEEPSEEK_V31,
    "deepseek_v31": _DEEPSEEK_V31,
    "deepseekv32": _dsml("deepseekv32", "function_calls"),
    "deepseekv4": _DSML_V4,
    "deepseek_v4": _DSML_V4,
    "kimi_k2": _KIMI,
    "kimi": _KIMI,
    "mistral": _MISTRAL,
    "gpt-oss": _HARMONY,
    "gptoss": _HARMONY,
    "openai": _HARMONY,
    "gemma4": GemmaFormat(),
    "functiongemma": GemmaFormat("functiongemma", "<start_function_call>", "<end_function_call>", quote="<escape>"),
    "cohere": _COHERE,
    "cohere_command4": _COHERE,
    "phi4_mini": JsonFormat("phi4_mini", "<|tool_call|>", "<|/tool_call|>", several=True, head="[", tail="]"),
    "phi4_mini_json": JsonFormat("phi4_mini_json", "functools", "", several=True, head="[", tail="]"),
    "granite": JsonFormat("granite", "<|tool_call|>", "", several=True, head="[", tail="]"),
    "jamba": JsonFormat("jamba", "<tool_calls>", "</tool_calls>", several=True, head="[", tail="]"),
    "lfm2": PythonFormat("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", bare=""),
    "llama3": _LLAMA,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "pythonic": _PYTHONIC,
    "llama4": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
}


def tool_format(name: str) -> ToolFormat:
    """Return the format of this name. Raises ConfigurationError listing the known names."""
    if name not in TOOL_FORMATS:
        raise ConfigurationError(f"--tool-parser {name} is not one of {', '.join(TOOL_FORMATS)}")
    return TOOL_FORMATS[name]
