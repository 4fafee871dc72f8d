"""ROLL's manager of environments whose observations are images, which the server does not take."""

from __future__ import annotations

from typing import Any

from proxy.errors import InvalidRequest
from proxy.rollout.roll.managers.traj_env_manager import TrajEnvManager


class VLTrajEnvManager(TrajEnvManager):
    """Refuses to be made: the server renders and records texts only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise InvalidRequest(
            "VLTrajEnvManager shows the model images, and the server takes texts only; use TrajEnvManager, with an "
            "environment that describes its state in words (render_mode: text)",
            param="env_manager_cls",
        )
