"""A tool made with verl's own base class, which counts its instances."""

from __future__ import annotations

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

alive: set[str] = set()
"""Instances that were created and not released."""


class Clock(BaseTool):
    """Tells the time of any city but Atlantis, which it raises on."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        created, response = await super().create(instance_id, **kwargs)
        alive.add(created)
        return created, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        assert instance_id in alive and kwargs["agent_data"].messages
        if parameters["city"] == "Atlantis":
            raise LookupError("no clock in Atlantis")
        return ToolResponse(text=f"It is noon {self.config['zone']} in {parameters['city']}."), 0.25, {"asked": 1}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        alive.remove(instance_id)
