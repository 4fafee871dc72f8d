"""The settings of verl's `config` that agent loops read, with verl's defaults."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from operator import index
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.rollout.config import Config
from tokengrove.tracing import tracer

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
            "seed": None,
            "free_cache_engine": False,
            "enable_rollout_routing_replay": False,
            "val_kwargs": {"temperature": 0, "top_p": 1.0, "top_k": -1, "n": 1, "do_sample": None},
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
                "custom_async_server": {"path": None, "name": None},
            },
            "trace": {
                "backend": None,
                "token2text": False,
                "max_samples_per_step_per_worker": None,
                "project_name": None,
                "experiment_name": None,
            },
        },
        "model": {"path": None},
    },
    "data": {"apply_chat_template_kwargs": {}, "mm_processor_kwargs": {}},
    "trainer": {"project_name": None, "experiment_name": None},
}
"""The defaults of verl 0.9, and our settings `keep` and `on_tool_error` (see ToolAgentLoop) and `max_failed_episodes`.
`tool_response_truncate_side` None means verl's `middle`. `free_cache_engine` is false because the server may be shared:
it sleeps on request only. `val_kwargs.do_sample` None: the temperature decides.
"""
GREEDY: dict[str, Any] = {"temperature": 0, "top_p": 1.0, "top_k": -1}


class DictConfigWrap:
    """Wraps a configuration as `config`, as verl passes it to agent loops (`trainer_config`, `data_config`)."""

    def __init__(self, config: Config) -> None:
        self.config = config


class ToolListWrap:
    """Wraps tools as `tools`, as verl passes them to agent loops."""

    def __init__(self, tools: list[Any]) -> None:
        self.tools = tools


def trainer_config(config: object) -> Config:
    """`config`, in any form that `Config` reads or wrapped as in verl, with verl's defaults."""
    if isinstance(config, DictConfigWrap) or type(config).__name__ in ("DictConfigWrap", "_DummyConfig"):
        config = config.config  # type: ignore[attr-defined]
    if isinstance(config, Config) and config.has_defaults(DEFAULTS):
        return config
    return Config({} if config is None else config, DEFAULTS)


def sampling_of(rollout: Config, *, validate: bool) -> dict[str, Any]:
    """Temperature, top-p and top-k of the section `rollout`, or of its `val_kwargs`; greedy if `do_sample` is false."""
    chosen = rollout.val_kwargs if validate else rollout
    return dict(GREEDY) if chosen.do_sample is False else {name: chosen[name] for name in GREEDY}


_NEAR = 0.75
"""The similarity to a setting, from 0 to 1, at which an unknown name counts as misspelt."""
_ROLLOUT = "actor_rollout_ref.rollout"
_NUMBERS = {
    f"{_ROLLOUT}.prompt_length": "a positive integer",
    f"{_ROLLOUT}.response_length": "a positive integer",
    f"{_ROLLOUT}.max_model_len": "a positive integer or null",
    f"{_ROLLOUT}.n": "a positive integer",
    f"{_ROLLOUT}.val_kwargs.n": "a positive integer",
    f"{_ROLLOUT}.trace.max_samples_per_step_per_worker": "a positive integer or null",
    f"{_ROLLOUT}.seed": "an integer or null",
    f"{_ROLLOUT}.multi_turn.max_parallel_calls": "a positive integer",
    f"{_ROLLOUT}.multi_turn.max_assistant_turns": "an integer or null",
    f"{_ROLLOUT}.multi_turn.max_user_turns": "an integer or null",
}
_OTEL = ("otel", "otlp", "opentelemetry")
_SWITCHES = tuple(
    f"{_ROLLOUT}.{name}"
    for name in (
        *("do_sample", "val_kwargs.do_sample", "full_determinism", "calculate_log_probs", "trace.token2text"),
        "enable_rollout_routing_replay",
    )
)
_WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "agent.custom_async_server.path": (None, "the server runs the engine; choose it with `tokengrove serve`"),
    "agent.custom_async_server.name": (None, "the server runs the engine; choose it with `tokengrove serve`"),
    "multi_turn.interaction_config_path": (None, "write a loop that adds the user's turns"),
    "multi_turn.num_repeat_rollouts": (None, "set n, or repeat the samples of the batch"),
    "ignore_eos": (False, "answers end with the model's end tokens"),
    "over_sample_rate": (0, "every sample of a batch runs to its end"),
    "skip_rollout": (False, "samples always run"),
    "skip.enable": (False, "samples always run"),
}
"""Settings below `rollout` that change samples in verl but have no effect here: by name the value that needs no
warning, and the reason for the warning about other values."""


def check_settings(config: Config) -> None:
    """Warn of misspelt settings, of settings without effect, and of a configuration without `actor_rollout_ref`. Raises
    InvalidRequest for a limit that is not an integer or is too small, and for a switch that is neither true nor false.
    """
    given = config.given()
    if given and not get_close_matches("actor_rollout_ref", given, 1, _NEAR):
        warnings.warn("the configuration has no 'actor_rollout_ref': verl's defaults are used", stacklevel=3)
    _warn_of_misspelt(config, DEFAULTS, "")
    for path, wanted in _NUMBERS.items():
        value = config.select(path)
        if value is None and wanted.endswith("null"):
            continue
        least = 1 if wanted.startswith("a positive") else 0
        if not _is_integer(value) or value < least:
            raise InvalidRequest(f"{path} must be {wanted}, not {value!r}", param=path)
    for path in _SWITCHES:
        value = config.select(path)
        if value is not None and not isinstance(value, bool):
            raise InvalidRequest(f"{path} must be true or false, not {value!r}", param=path)
    warn_of_unused(config, _WITHOUT_EFFECT)
    _warn_of_trace(config.actor_rollout_ref.rollout.trace.backend)
    _warn_of_sampling(config.actor_rollout_ref.rollout, f"{_ROLLOUT}.")
    _warn_of_sampling(config.actor_rollout_ref.rollout.val_kwargs, f"{_ROLLOUT}.val_kwargs.")


def warn_of_unused(config: Config, unused: Mapping[str, tuple[Any, str]]) -> None:
    """Warn of settings without effect. `unused`: by name the value that needs no warning, and the reason."""
    for name, (quiet, why) in unused.items():
        value = config.select(f"{_ROLLOUT}.{name}", quiet)
        if value not in (None, quiet):
            warnings.warn(f"{_ROLLOUT}.{name}={value!r} has no effect: {why}", stacklevel=4)


def _warn_of_trace(backend: Any) -> None:
    """Warn if `trace.backend` is set, but no spans are made or they go elsewhere."""
    if backend is None:
        return
    where = "set OTEL_EXPORTER_OTLP_ENDPOINT to the address of a collector"
    if tracer() is None:
        message = f"{_ROLLOUT}.trace.backend={backend!r} makes no spans: traces are off in this process; {where}"
        warnings.warn(message, stacklevel=4)
    elif str(backend).lower() not in _OTEL:
        message = f"{_ROLLOUT}.trace.backend={backend!r}: spans are OpenTelemetry's, and its variables configure them"
        warnings.warn(message, stacklevel=4)


def _warn_of_sampling(section: Config, path: str) -> None:
    """Warn if `do_sample` contradicts the sampling parameters."""
    if section.do_sample is True and section.temperature == 0 and "do_sample" in section.given():
        warnings.warn(f"{path}temperature is 0, which is greedy, although do_sample is true", stacklevel=4)
    if section.do_sample is not False:
        return
    for name, greedy in GREEDY.items():
        if section[name] not in (greedy, DEFAULTS["actor_rollout_ref"]["rollout"][name]):
            message = f"{path}{name}={section[name]!r} has no effect: do_sample is false, so sampling is greedy"
            warnings.warn(message, stacklevel=4)


def _is_integer(value: Any) -> bool:
    try:
        index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def _warn_of_misspelt(section: Config, defaults: Mapping[str, Any], path: str) -> None:
    for name in section.given():
        if name not in defaults and (near := get_close_matches(name, defaults, 1, _NEAR)):
            message = f"{path}{name} is not a setting of agent loops and has no effect; did you mean {path}{near[0]}?"
            warnings.warn(message, stacklevel=2)
    for name, below in defaults.items():
        if isinstance(below, Mapping) and below and isinstance(value := section[name], Config):
            _warn_of_misspelt(value, below, f"{path}{name}.")
