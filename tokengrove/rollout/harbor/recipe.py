"""Follows a Dockerfile in an environment that is not an image: its files, folders, variables and commands.

An instruction that cannot be followed makes the build fail with its line, or is reported by `not_followed`.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Literal

from tokengrove.rollout.harbor.dockerfile import Instruction, expand, instructions, pairs, unquoted
from tokengrove.rollout.harbor.harbor_sandbox import HarborSandbox
from tokengrove.rollout.harbor.task_folder import BadTask

RunLines = Literal["run", "try", "skip"]
"""How RUN lines are handled: run them, run them but ignore failures (`try`), or skip them."""

_SHOWN = 800
_SHELL = ["/bin/sh", "-c"]
_COPIED = {"chown", "chmod", "link"}
_FLAGS = {"COPY": _COPIED, "ADD": _COPIED, "RUN": {"mount", "network", "security"}}
_ONLY_HEREDOC = re.compile(r"<<-? *(['\"]?)\w+\1$")
_ARCHIVE = re.compile(r"\.(tar|tar\.gz|tgz|tar\.bz2|tbz2|tar\.xz|txz)$")
Say = Callable[[str], None]


class Recipe:
    """The instructions of `build`/Dockerfile. `workdir` and `env`: those of the described image, set by `follow`."""

    def __init__(self, build: Path, run_lines: RunLines, say: Say) -> None:
        """`say`: called with a message for each RUN line with an ignored failure. Raises BadTask for an invalid
        Dockerfile.
        """
        self._build, self._run_lines, self._say = build, run_lines, say
        self.workdir = "/"
        self.env: dict[str, str] = {}
        self._args: dict[str, str] = {}
        self._before: dict[str, str] = {}  # ARGs before the first FROM, which later ARGs may use
        self._shell = _SHELL
        file = build / "Dockerfile"
        self._instructions = instructions(file) if file.is_file() else []
        for each in self._instructions:
            _check_flags(each)

    async def follow(self, sandbox: HarborSandbox, base: Mapping[str, str]) -> None:
        """Follow all instructions. `base`: the variables of the environment without them. Raises BadTask."""
        self._base = dict(base)
        for each in self._instructions:
            await self._one(each, sandbox)

    async def _one(self, each: Instruction, sandbox: HarborSandbox) -> None:
        match each.name:
            case "FROM":
                self._before, self._args = self._args, {}
            case "WORKDIR":
                self.workdir = str(PurePosixPath(self.workdir, unquoted(each.value, self._known)))
                await sandbox.run(["mkdir", "-p", self.workdir])
            case "ENV":
                self.env |= pairs(each, self._known)
            case "ARG":
                self._arg(each)
            case "SHELL":
                self._shell = each.words or _SHELL
            case "COPY" | "ADD":
                await self._copy(each, sandbox)
            case "RUN":
                await self._run(each, sandbox)
            case "VOLUME":
                await sandbox.run(["mkdir", "-p", *(each.words or each.value.split())])

    @property
    def _known(self) -> dict[str, str]:
        return {**self._base, **self._args, **self.env}

    def _arg(self, each: Instruction) -> None:
        for word in shlex.split(each.value):
            name, given, value = word.partition("=")
            if given or name in self._before:
                self._args[name] = expand(value, self._known) if given else self._before[name]

    async def _run(self, each: Instruction, sandbox: HarborSandbox) -> None:
        if self._run_lines == "skip":
            return
        variables = {**self._args, **self.env}
        await sandbox.run(["mkdir", "-p", self.workdir])
        told = await sandbox.run(self._words(each), variables)
        if told.exit_code == 0:
            return
        text = f"{each.where}: RUN {each.value[:_SHOWN]} ended with {told.exit_code}: {told.output[-_SHOWN:].strip()}"
        if self._run_lines == "try":
            self._say(text)
            return
        raise BadTask(
            f"{text}\nThe programs of this machine replace the image. Use dockerfile_run=try or skip to ignore such "
            "lines, or sandbox=docker to build the image"
        )

    def _words(self, each: Instruction) -> list[str]:
        inside = f"cd {shlex.quote(self.workdir)} && "
        if each.words is not None:
            return ["/bin/sh", "-c", f"{inside}exec {shlex.join(each.words)}"]
        text = each.value
        if _ONLY_HEREDOC.match(text):
            text = _script(each.heredocs[0].text)
        else:
            text = "\n".join([text, *(f"{one.text}{one.name}" for one in each.heredocs)])
        return ["/bin/sh", "-c", f'{inside}exec "$@"', "sh", *self._shell, text]

    async def _copy(self, each: Instruction, sandbox: HarborSandbox) -> None:
        words = each.words or [unquoted(word, self._known) for word in shlex.split(each.value, posix=False)]
        if len(words) < 2:
            raise BadTask(f"{each.where}: {each.name} needs a source and a target")
        *sources, target = words
        into = target.endswith("/") or len(sources) > 1 or target in (".", "..")
        target = str(PurePosixPath(self.workdir, target))
        mode = int(each.flags["chmod"], 8) if re.fullmatch(r"[0-7]{3,4}", each.flags.get("chmod", "")) else None
        with tempfile.TemporaryDirectory(prefix="tokengrove-copy-") as scratch:
            entries: list[tuple[Path, str]] = []
            for source in sources:
                entries += self._entries(each, source, target, into, Path(scratch))
            await sandbox.put(entries, mode)
        for path, name in entries:
            if each.name == "ADD" and _ARCHIVE.search(path.name):
                await _extract(name, target, sandbox)

    def _entries(
        self, each: Instruction, source: str, target: str, into: bool, scratch: Path
    ) -> list[tuple[Path, str]]:
        """The files of this machine and their targets for one source."""
        for heredoc in each.heredocs:
            if source.strip("<-'\"") == heredoc.name:
                file = scratch / heredoc.name
                file.write_text(expand(heredoc.text, self._known) if heredoc.expanded else heredoc.text)
                return [(file, f"{target}/{file.name}" if into else target)]
        if re.match(r"\w+://|git@", source):
            raise BadTask(f"{each.where}: {each.name} of {source} needs an image; use sandbox=docker")
        root = self._build.resolve()
        found = sorted(root.glob(source.strip("/"))) if source.strip("/.") else [root]
        if not found:
            raise BadTask(f"{each.where}: there is no {source!r} in {root}")
        entries = []
        for path in found:
            if not path.resolve().is_relative_to(root):
                raise BadTask(f"{each.where}: {source!r} leads out of {root}")
            plain = path.is_dir() or not (into or len(found) > 1)
            entries.append((path, target if plain else f"{target}/{path.name}"))
        return entries


async def _extract(name: str, target: str, sandbox: HarborSandbox) -> None:
    """Extract an archive of this machine, as ADD does."""
    file, folder = shlex.quote(name), shlex.quote(target)
    packed = f"{file}.packed"
    told = await sandbox.run(f"mv {file} {packed} && mkdir -p {folder} && tar -xf {packed} -C {folder} && rm {packed}")
    if told.exit_code:
        raise BadTask(f"ADD: {name} cannot be extracted: {told.output[-_SHOWN:]}")


def not_followed(build: Path) -> list[tuple[str, str]]:
    """The parts of a Dockerfile that have no effect without an image: their keys, with a message."""
    file = build / "Dockerfile"
    if not file.is_file():
        return []
    found: list[tuple[str, str]] = []
    for each in instructions(file):
        if each.name == "FROM" and each.value.split()[:1] != ["scratch"]:
            found.append(("FROM", f"the programs of this machine replace the image {each.value.split()[0]}"))
        elif each.name == "USER":
            found.append(("USER", f"all commands run as one user, not as {each.value}"))
        elif each.name in ("ENTRYPOINT", "HEALTHCHECK", "ONBUILD"):
            found.append((each.name, f"{each.name} is not run"))
    if (build / ".dockerignore").is_file():
        found.append((".dockerignore", "COPY copies all files, also those in .dockerignore"))
    return found


def _check_flags(each: Instruction) -> None:
    if "from" in each.flags and each.name == "COPY":
        raise BadTask(f"{each.where}: COPY --from={each.flags['from']} needs another image; use sandbox=docker")
    if wrong := sorted(each.flags.keys() - _FLAGS.get(each.name, {"platform", *each.flags})):
        raise BadTask(f"{each.where}: {each.name} --{wrong[0]} needs an image; use sandbox=docker")
    kinds = each.flags.get("mount", "type=cache")
    if "type=cache" not in kinds:
        raise BadTask(f"{each.where}: RUN --mount={kinds} needs an image; use sandbox=docker")


def _script(text: str) -> str:
    """A shell text that runs a script with the program of its first line, if it has one."""
    if not text.startswith("#!"):
        return text
    name = f"/tmp/run-{os.urandom(4).hex()}"
    return f"cat > {name} <<'END_OF_{name[9:]}'\n{text}END_OF_{name[9:]}\nchmod +x {name} && {name}"
