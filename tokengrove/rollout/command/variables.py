"""The environment variables of a command: those that SDKs and coding agents read, and variables of the caller.

None of them contains the control key. Of the caller's environment, the command gets PATH, language, time zone, library
path and certificates, and the variables that are passed explicitly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tokengrove.rollout.command.addresses import Addresses, addresses_of
from tokengrove.rollout.environment import agent_variables
from tokengrove.rollout.episodes import Episode
from tokengrove.rollout.sandboxes.local_process_sandbox import KEPT

_QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "COPILOT_OFFLINE": "true",
}
"""Settings that keep coding agents from checking for updates and sending telemetry in every episode."""


def command_variables(episode: Episode, *, model: str = "tokengrove", server_url: str | None = None) -> dict[str, str]:
    """The variables from which a command of any SDK or coding agent reads its session."""
    plan = episode.plan
    return {
        **program_variables(addresses_of(episode.session, server_url), model),
        "TOKENGROVE_SESSION_ID": plan.session_id,
        "TOKENGROVE_TASK_ID": plan.task.task_id.replace("\0", ""),
        "TOKENGROVE_SAMPLE": str(plan.sample),
        "TOKENGROVE_SEED": str(plan.seed),
    }


def program_variables(addresses: Addresses, model: str) -> dict[str, str]:
    """The variables from which any SDK or coding agent reads the address of the model."""
    found = {name: value for name, value in agent_variables(addresses).items() if value is not None}
    return {
        **_QUIET,
        **found,
        "OPENAI_MODEL": model,
        **_of_opencode(addresses, model),
        **_of_copilot(addresses, model),
        "TOKENGROVE_BASE_URL": addresses.base_url,
        "TOKENGROVE_ROOT_URL": addresses.root_url,
        "TOKENGROVE_API_KEY": addresses.api_key,
        "TOKENGROVE_MODEL": model,
    }


_TOOLS = {
    "PYENV_ROOT": ".pyenv",
    "NVM_DIR": ".nvm",
    "VOLTA_HOME": ".volta",
    "ASDF_DATA_DIR": ".asdf",
    "RUSTUP_HOME": ".rustup",
}
"""The folders of version managers, relative to HOME. They are set explicitly, because a command has another HOME."""


def tool_variables() -> dict[str, str]:
    """The variables of the caller's version managers; without them, programs such as `python` may find no version."""
    home = Path(os.path.expanduser("~"))
    places = {name: os.environ.get(name) or str(home / folder) for name, folder in _TOOLS.items()}
    return {name: place for name, place in places.items() if Path(place).is_dir()}


def inherited_variables(names: Sequence[str] = ()) -> dict[str, str]:
    """The variables of this process that a command gets: those that all programs need, and those that match `names`."""
    return passed_variables((*KEPT, *names))


def passed_variables(names: Sequence[str]) -> dict[str, str]:
    """The variables of this process whose names match these names or patterns."""
    return {name: value for name, value in os.environ.items() if any(fnmatchcase(name, each) for each in names)}


def codex_configuration(addresses: Addresses, model: str) -> str:
    """The content of a config.toml for Codex, which does not read its address from variables."""
    return "\n".join(
        [
            f"model = {_toml(model)}",
            'model_provider = "tokengrove"',
            "[model_providers.tokengrove]",
            'name = "tokengrove"',
            f"base_url = {_toml(addresses.base_url)}",
            'env_key = "OPENAI_API_KEY"',
            'wire_api = "responses"',
            "[analytics]",
            "enabled = false",
            "",
        ]
    )


def _toml(text: str) -> str:
    return json.dumps(text)  # TOML's basic strings have the escapes of JSON


def _of_opencode(addresses: Addresses, model: str) -> dict[str, str]:
    """The configuration of opencode, which reads a whole configuration from a variable, but not an address."""
    provider: dict[str, Any] = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": addresses.base_url, "apiKey": addresses.api_key},
        "models": {model: {"limit": {"context": 100_000, "output": 4096}}},
    }
    configuration = {
        **{"autoupdate": False, "share": "disabled", "model": f"tokengrove/{model}"},
        "provider": {"tokengrove": provider},
    }
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(configuration)}


def _of_copilot(addresses: Addresses, model: str) -> dict[str, str]:
    return {
        "COPILOT_PROVIDER_BASE_URL": addresses.base_url,
        "COPILOT_PROVIDER_TYPE": "openai",
        "COPILOT_PROVIDER_WIRE_API": "completions",
        "COPILOT_PROVIDER_API_KEY": addresses.api_key,
        "COPILOT_MODEL": model,
    }
