"""The classes of sandboxes by the names of their providers."""

from __future__ import annotations

from tokengrove.errors import ConfigurationError
from tokengrove.rollout.imports import load
from tokengrove.rollout.sandboxes.sandbox import Sandbox

_HERE = "tokengrove.rollout.sandboxes"
PROVIDERS = {
    "e2b": f"{_HERE}.e2b_sandbox:E2BSandbox",
    "daytona": f"{_HERE}.daytona_sandbox:DaytonaSandbox",
    "modal": f"{_HERE}.modal_sandbox:ModalSandbox",
    "kubernetes": f"{_HERE}.kubernetes_sandbox:KubernetesSandbox",
    "agent-sandbox": f"{_HERE}.agent_sandbox:AgentSandbox",
}
"""The paths of the classes, whose modules import an SDK only when a sandbox is made."""


def sandbox_class(name: str) -> type[Sandbox]:
    """The class of a provider, or at a path `package.module:Class`.

    Raises ConfigurationError for an unknown provider and for an object that is no such class, and InvalidRequest for a
    path that does not exist.
    """
    if name not in PROVIDERS and "." not in name and ":" not in name:
        raise ConfigurationError(
            f"--sandbox {name} is not a provider; known: {', '.join(PROVIDERS)}, or package.module:Class"
        )
    found = load(PROVIDERS.get(name, name))
    if not (isinstance(found, type) and issubclass(found, Sandbox)):
        raise ConfigurationError(f"--sandbox {name} is not a subclass of tokengrove.rollout.sandboxes.Sandbox")
    return found
