"""Facts that SGLang reports about itself: its arguments with the values that it chose, and the state of its schedulers.

In newer SGLang, `server_args` has no value for an argument that was not given, such as the device; the facts have the
chosen one. Over HTTP the facts are the answer of `/server_info`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.engine.interface import Capability

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


def capabilities_by(facts: Mapping[str, Any]) -> frozenset[Capability]:
    """The capabilities of an SGLang with `facts`."""
    missing = set()
    if facts.get("skip_tokenizer_init") or facts.get("grammar_backend") == "none":
        missing.add(Capability.GRAMMAR)
    if facts.get("skip_tokenizer_init"):  # its scheduler asks the tokenizer for the end tokens
        missing.add(Capability.MIN_TOKENS)
    if not facts.get(SEEDED):
        missing.add(Capability.DETERMINISTIC)
    if facts and not facts.get("enable_memory_saver"):
        missing.add(Capability.RELEASE_MEMORY)
    return frozenset(Capability) - missing


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
