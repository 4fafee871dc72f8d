"""Containers of manifests as plain processes: their command, variables and folders, without a container runtime.

What a manifest says about paths and ports becomes folders and a free port of the test. `tokengrove` and `python` are
those of the tests.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.docs.pages import ROOT, blocks_of

KUBERNETES = ROOT / "docker" / "kubernetes"


def shown(name: str) -> str:
    """The file that docs/deployment.md shows under this name."""
    blocks = blocks_of(ROOT / "docs" / "deployment.md")
    return next(block.text for block in blocks if block.directive == "file" and block.argument == name)


def documents(path: Path) -> list[dict[str, Any]]:
    """The objects of a manifest."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def pods_of(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod specs in `objects` by the name of what makes the pods."""
    specs = [(item["metadata"]["name"], item.get("spec", {})) for item in objects]
    templates = [(name, spec.get("jobTemplate", {"spec": spec})["spec"].get("template")) for name, spec in specs]
    return {name: template["spec"] for name, template in templates if template}


def containers_of(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def variables_of(container: dict[str, Any], given: Mapping[str, str]) -> dict[str, str]:
    """The variables that a container gets. `given`: what its references to Secrets, ConfigMaps and fields stand for.

    As the kubelet does, `$(NAME)` in a value becomes the variable NAME that was defined before.
    """
    values: dict[str, str] = {}
    for entry in container.get("env", ()):
        text = entry["value"] if "value" in entry else given[entry["name"]]
        values[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], text)
    return values


@dataclass(frozen=True, slots=True)
class Machine:
    """Where containers run: `folder` holds their volumes, `port` stands for 8080."""

    folder: Path
    port: int

    def path(self, mounted: str) -> Path:
        return self.folder / mounted.strip("/")

    @contextmanager
    def running(self, container: dict[str, Any], given: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
        """Run the command of a container until the block ends; the image's entry point is `tokengrove`."""
        process = subprocess.Popen(
            [*container.get("command", ["tokengrove"]), *map(self._here, container["args"])],
            cwd=self.folder,
            env={**self._environment(), **{k: self._here(v) for k, v in variables_of(container, given).items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.communicate()

    def run(self, container: dict[str, Any], given: Mapping[str, str]) -> str:
        """What a container prints until it ends. Raises AssertionError for another exit code than 0."""
        with self.running(container, given) as process:
            printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0, printed
        return printed

    def _here(self, text: str) -> str:
        text = re.sub(
            r"(?<![\w.])/(data|trajectories|backups|var/lib|tmp)\b", lambda found: str(self.path(found[1])), text
        )
        return re.sub(r"\b8080\b", str(self.port), text)

    def _environment(self) -> dict[str, str]:
        tools = self.folder / "bin"
        if not tools.exists():
            tools.mkdir(parents=True)
            for name, arguments in (("tokengrove", " -m tokengrove"), ("python", "")):
                script = tools / name
                script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{arguments} "$@"\n')
                script.chmod(0o755)
            self.path("tmp").mkdir()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TOKENGROVE_")}
        path = f"{tools}:{inherited['PATH']}"
        home = "/proc/none"  # of an image that cannot be written; a manifest may name another
        return {**inherited, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "HOME": home}
