"""Makes the environments of tasks from the options, and reads each task once."""

from __future__ import annotations

import logging
from pathlib import Path

from tokengrove.rollout.harbor.container import Container, Images
from tokengrove.rollout.harbor.harbor_sandbox import Blueprint, HarborSandbox
from tokengrove.rollout.harbor.options import HarborOptions
from tokengrove.rollout.harbor.room import Room
from tokengrove.rollout.harbor.task_folder import TaskFolder
from tokengrove.rollout.harbor.unmet import check

_log = logging.getLogger(__name__)


class Sandboxes:
    """The sandboxes of one agent, whose episodes share images and logged warnings."""

    def __init__(self, options: HarborOptions) -> None:
        """Raises ConfigurationError if the program for containers is not installed."""
        self._options = options
        self._images = None if options.sandbox == "room" else Images(options.sandbox)
        self._tasks: dict[Path, TaskFolder] = {}
        self._said: set[str] = set()

    def task(self, folder: Path) -> TaskFolder:
        """Read a task and check that it can be run. Raises BadTask."""
        if folder not in self._tasks:
            task = TaskFolder(folder)
            check(task, image=self._images is not None, accepted=self._options.accept)
            self._tasks[folder] = task
        return self._tasks[folder]

    def make(self, blueprint: Blueprint) -> HarborSandbox:
        """An environment that has not been started."""
        if self._images is not None:
            return Container(blueprint, self._images, self._options.sandbox_args)
        return Room(blueprint, self._options.dockerfile_run, self._options.visible, self._say)

    async def close(self) -> None:
        """Cancel builds that still run."""
        if self._images is not None:
            await self._images.close()

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            _log.warning("%s", text)
