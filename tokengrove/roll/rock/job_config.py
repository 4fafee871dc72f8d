"""The configuration of a job, with the keys of Rock's files, and keys of ours for the programs in a sandbox.

```yaml
environment: {env: {NAME: value}, startup_timeout: 300}
agents:
  - command: python agent.py      # or import_path: my_agents:solve
    setup_command: pip install -r requirements.txt
    env: {NAME: value}
    max_timeout_sec: 1800
    kwargs: {max_iterations: 50}
verifier:
  command: pytest -q tests
  max_timeout_sec: 600
jobs_dir: jobs
```
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.roll.config.yaml_text import read_yaml
from tokengrove.roll.values import Section

_USED = {"", "agents", "datasets", "environment", "experiment_id", "job_name", "jobs_dir", "task", "verifier"}
_USED_OF = {
    "agents": {
        *("name", "model_name", "command", "import_path", "setup_command", "env", "kwargs", "max_timeout_sec"),
    },
    "verifier": {"command", "env", "max_timeout_sec"},
}
_log = logging.getLogger(__name__)


class JobConfig(Section):
    """A Section with `agents` (the first one runs), `environment`, `verifier`, `datasets` and `jobs_dir`.

    Every other key of a file is kept unchanged, for your own sandbox or job classes.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        given: dict[str, Any] = {name: _plain(value) for name, value in {**(values or {}), **more}.items()}
        super().__init__({**given, **{name: given.get(name) or empty for name, empty in _EMPTY.items()}})
        if not isinstance(self["agents"], list) or not all(isinstance(agent, Mapping) for agent in self["agents"]):
            raise InvalidRequest("'agents' in the job's configuration must be a list of sections", param="agents")

    @classmethod
    def from_yaml(cls, path: str | Path) -> JobConfig:
        """Read a file. Raises InvalidRequest if it is missing, or is not YAML with sections."""
        try:
            content = read_yaml(Path(path).expanduser())
        except InvalidRequest as error:
            raise InvalidRequest(f"'job_config_path': {error.message}", param="job_config_path") from None
        if not isinstance(content, Mapping):
            raise InvalidRequest(f"'job_config_path': {path} has no sections", param="job_config_path")
        return cls(content)

    def model_copy(self, *, deep: bool = False) -> JobConfig:
        """A copy; `deep`: with copies of its sections."""
        return copy.deepcopy(self) if deep else JobConfig(self)

    @property
    def agent(self) -> Section:
        """The first of `agents`; an empty section if there is none."""
        agent: Section = self["agents"][0] if self["agents"] else Section()
        return agent


def _plain(value: Any) -> Any:
    """Plain dicts and lists instead of a configuration's own types, such as OmegaConf's."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(each) for each in value]
    return value


_EMPTY: dict[str, Any] = {"agents": [], "datasets": [], "environment": {}, "verifier": {}, "jobs_dir": "jobs"}
_said: set[str] = set()


def say_unused(config: JobConfig) -> None:
    """Log, once per process, the keys of a file that our jobs do not read."""
    unused = {name for name, value in config.items() if value and name not in _USED}
    for section, used in _USED_OF.items():
        entries = config[section] if section == "agents" else [config[section]]
        unused |= {
            f"{section}.{name}" for entry in entries for name, value in entry.items() if value and name not in used
        }
    if unused := unused - _said:
        _said.update(unused)
        _log.info("the job's configuration: %s: kept, but not used by jobs of this package", ", ".join(sorted(unused)))
