"""The settings of verl's `config` that agent loops read, with verl's defaults."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from operator import index
from typing import Any

from proxy.errors import InvalidRequest
from proxy.rollout.config import Config

DEFAULTS: dict[str, Any] = {
    "actor_rollout_ref": {
        "rollout": {
            "prompt_length": "${oc.select:data.max_prompt_length,512}",
            "response_length": "${oc.select:data.max_response_length,512}",
            "max_model_len": None,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "do_sample": True,
            "n": 1,
            "calculate_log_probs": True,
            "full_determinism": False,
            "free_cache_engine": False,
            "val_kwargs": {"temperature": 0, "top_p": 1.0, "top_k": -1, "n": 1, "do_sample": False},
            "multi_turn": {
                "enable": False,
                "max_assistant_turns": None,
                "max_user_turns": None,
                "max_parallel_calls": 1,
                "max_tool_response_length": 256,
                "tool_response_truncate_side": None,
                "keep": None,
                "on_tool_error": "message",
                "tool_config_path": None,
                "function_tool_path": None,
                "format": "hermes",
            },
            "agent": {
                "num_workers": 8,
                "default_agent_loop": "single_turn_agent",
                "agent_loop_config_path": None,
                "max_failed_episodes": None,
            },
            "trace": {},
        },
        "model": {"path": None},
    },
    "data": {"apply_chat_template_kwargs": {}, "mm_processor_kwargs": {}},
    "trainer": {"project_name": None, "experiment_name": None},
}
"""Those of verl 0.9, and of ours `keep` and `on_tool_error` (see ToolAgentLoop) and `max_failed_episodes`.
`tool_response_truncate_side` None is verl's `middle`. `free_cache_engine` is false: a server that others may use is put
to sleep on request only.
"""


class DictConfigWrap:
    """Holds a configuration as `config`, as verl gives it to agent loops (`trainer_config`, `data_config`)."""

    def __init__(self, config: Config) -> None:
        self.config = config


class ToolListWrap:
    """Holds tools as `tools`, as verl gives them to agent loops."""

    def __init__(self, tools: list[Any]) -> None:
        self.tools = tools


def trainer_config(config: object) -> Config:
    """Return `config`, in any form that `Config` reads or wrapped as verl does, with verl's defaults."""
    if isinstance(config, DictConfigWrap) or type(config).__name__ in ("DictConfigWrap", "_DummyConfig"):
        config = config.config  # type: ignore[attr-defined]
    if isinstance(config, Config) and config.has_defaults(DEFAULTS):
        return config
    return Config({} if config is None else config, DEFAULTS)


_NEAR = 0.75
"""How much of a name must be right for it to be a misspelt one."""
_ROLLOUT = "actor_rollout_ref.rollout"
_NUMBERS = {
    f"{_ROLLOUT}.prompt_length": "a positive integer",
    f"{_ROLLOUT}.response_length": "a positive integer",
    f"{_ROLLOUT}.max_model_len": "a positive integer or null",
    f"{_ROLLOUT}.multi_turn.max_parallel_calls": "a positive integer",
    f"{_ROLLOUT}.multi_turn.max_assistant_turns": "an integer or null",
    f"{_ROLLOUT}.multi_turn.max_user_turns": "an integer or null",
}


def check_settings(config: Config) -> None:
    """Warn of names that are nearly those of settings, which keep their defaults then, and of a configuration without
    `actor_rollout_ref`. Raises InvalidRequest for a limit that is no integer, or too small.
    """
    given = config.given()
    if given and not get_close_matches("actor_rollout_ref", given, 1, _NEAR):
        warnings.warn("the configuration has no 'actor_rollout_ref': verl's defaults hold", stacklevel=3)
    _warn_of_misspelt(config, DEFAULTS, "")
    for path, wanted in _NUMBERS.items():
        value = config.select(path)
        if value is None and wanted.endswith("null"):
            continue
        least = 1 if wanted.startswith("a positive") else 0
        if not _is_integer(value) or value < least:
            raise InvalidRequest(f"{path} must be {wanted}, not {value!r}", param=path)


def _is_integer(value: Any) -> bool:
    try:
        index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def _warn_of_misspelt(section: Config, defaults: Mapping[str, Any], path: str) -> None:
    given = section.given()
    lacking = [name for name in defaults if name not in given]
    for name in given:
        if name not in defaults and (near := get_close_matches(name, lacking, 1, _NEAR)):
            message = f"{path}{name} is no setting of agent loops, and has no effect; did you mean {path}{near[0]}?"
            warnings.warn(message, stacklevel=2)
    for name, below in defaults.items():
        if isinstance(below, Mapping) and below and isinstance(value := section[name], Config):
            _warn_of_misspelt(value, below, f"{path}{name}.")
