"""Facts that SGLang reports about itself: its arguments with the values that it chose, and the state of its schedulers.

In newer SGLang, `server_args` has no value for an argument that was not given, such as the device; the facts have the
chosen one. Over HTTP the facts are the answer of `/server_info`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from proxy.engine.expert_layers import ExpertLayers
from proxy.engine.interface import Capability
from tokengrove.options.start import Replay

SEEDED = "enable_deterministic_inference"
"""The fact that SGLang reports if it supports seeds."""

_MOST_RUNNING = "effective_max_running_requests_per_dp"
"""The fact about the number of requests that each scheduler runs at once."""


def running_by(facts: Mapping[str, Any]) -> int | None:
    """The number of requests that all schedulers with `facts` run at once; None if unknown."""
    states = facts.get("internal_states")
    told = [state.get(_MOST_RUNNING) for state in states if isinstance(state, dict)] if isinstance(states, list) else []
    numbers = [number for number in told if isinstance(number, int) and number > 0]
    return sum(numbers) or None


def dtype_by(facts: Mapping[str, Any]) -> str:
    """The dtype of the weights; "" if SGLang tells only that it chose one."""
    dtype = str(facts.get("dtype") or "")
    return "" if dtype == "auto" else dtype.removeprefix("torch.")


def capabilities_by(facts: Mapping[str, Any]) -> frozenset[Capability]:
    """The capabilities of an SGLang with `facts`."""
    missing = {Capability.PROMPT_TEMPERATURE}  # its logprobs of prompts are of the model itself
    if facts.get("skip_tokenizer_init") or facts.get("grammar_backend") == "none":
        missing.add(Capability.GRAMMAR)
    if facts.get("skip_tokenizer_init"):  # its scheduler asks the tokenizer for the end tokens
        missing.add(Capability.MIN_TOKENS)
    if not facts.get(SEEDED):
        missing.add(Capability.DETERMINISTIC)
    if facts and not facts.get("enable_memory_saver"):
        missing.add(Capability.RELEASE_MEMORY)
    if adapterless_by(facts, flags=""):
        missing.add(Capability.ADAPTERS)
    return frozenset(Capability) - missing


def adapterless_by(facts: Mapping[str, Any], flags: str) -> str:
    """The reason why an SGLang with `facts` takes no LoRA adapters at run time; "" if it does. `flags`: the way out."""
    if not facts.get("enable_lora"):
        return f"SGLang takes no LoRA adapters; {flags}"
    if (size := facts.get("dp_size") or 1) > 1:
        return f"SGLang loads no LoRA adapters with data parallelism (dp_size {size}); use several servers instead"
    return ""


def missing_by(facts: Mapping[str, Any]) -> list[str]:
    """For each flag that keeps an SGLang with `facts` from a capability, the flag and what it costs, as a sentence."""
    told = []
    if facts.get("skip_tokenizer_init"):
        told.append(
            "with --skip-tokenizer-init it serves no forced tools, no JSON schemas, no images and no min_tokens"
        )
    elif facts.get("grammar_backend") == "none":
        told.append("with --grammar-backend none it serves no forced tools and no JSON schemas")
    return told


_MASKS_SINCE, _EXPERTS_SINCE = (0, 5, 16), (0, 5, 12)
"""The first versions with kept sets, and with experts from a given token on instead of from the first."""

EXPERTS_FLAG = "enable_return_routed_experts"
"""The argument of SGLang, and the fact, that experts are reported to requests that ask for them."""

_EXACT_DRAFTS = ("DFLASH", "DSPARK")
"""The algorithms of speculative decoding with which SGLang reports kept sets; 0.5.22 and later."""


def unrecorded_by(
    facts: Mapping[str, Any], layers: ExpertLayers | None, experts_flag: str
) -> tuple[tuple[Replay, str], ...]:
    """The side columns that an SGLang with `facts` does not record, and why, with the way out.

    `layers`: the expert layers of its model, None if they are not known here. `experts_flag`: how it is started so that
    it records experts.
    """
    why = {Replay.KEPT: _no_sets(facts), Replay.EXPERTS: _no_experts(facts, layers, experts_flag)}
    return tuple((each, reason) for each, reason in why.items() if reason)


def recorded_by(unrecorded: tuple[tuple[Replay, str], ...]) -> frozenset[Replay]:
    """The side columns that an SGLang records that does not record these."""
    return frozenset(Replay) - {each for each, _ in unrecorded}


def _no_sets(facts: Mapping[str, Any]) -> str:
    drafts = str(facts.get("speculative_algorithm") or "")
    if (version := _version(facts)) is not None and version < _MASKS_SINCE:
        return f"SGLang {facts['version']} does not report kept sets (return_sampling_mask): 0.5.16 and later do"
    if facts.get("sampling_backend") == "ascend":
        return "SGLang reports no kept sets with --sampling-backend ascend; start it with another backend"
    if drafts and drafts not in _EXACT_DRAFTS:
        return f"SGLang reports no kept sets with --speculative-algorithm {drafts}; start it without"
    return ""


def _no_experts(facts: Mapping[str, Any], layers: ExpertLayers | None, flag: str) -> str:
    if layers is not None and layers.dense:
        return "the model has no experts"
    if (version := _version(facts)) is not None and version < _EXPERTS_SINCE:
        return f"SGLang {facts['version']} reports experts of the whole prompt every turn: 0.5.12 and later do not"
    if not facts.get(EXPERTS_FLAG):
        return f"SGLang was started without reporting experts; {flag}"
    if layers is None:
        return "the layers of the model are not known, so that rows cannot be told apart; give --model with its config"
    return ""


def _version(facts: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The release of an SGLang; None if it is unknown, as of one that was built from source."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", str(facts.get("version") or ""))
    numbers = tuple(map(int, found.groups())) if found else ()
    return numbers if any(numbers) else None
