"""The settings of verl's `config` that agent loops read, with verl's defaults."""

from __future__ import annotations

from typing import Any

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
            "agent": {"num_workers": 8, "default_agent_loop": "single_turn_agent", "agent_loop_config_path": None},
            "trace": {},
        },
        "model": {"path": None},
    },
    "data": {"apply_chat_template_kwargs": {}, "mm_processor_kwargs": {}},
    "trainer": {"project_name": None, "experiment_name": None},
}
"""Those of verl 0.9, and `keep` and `on_tool_error` of ours (see ToolAgentLoop). `tool_response_truncate_side` None is
verl's `middle`. `free_cache_engine` is false: a server that others may use is put to sleep on request only.
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
