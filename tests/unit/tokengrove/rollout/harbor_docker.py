"""A program that stands for `docker`: images are folders, containers are rooms, by the same words.

`build --tag NAME FOLDER`, `run -i --rm ... IMAGE WORDS`, `exec -i ... NAME WORDS`, `rm --force NAME`. Its state, and a
file `calls` with the words of each call, are in the folder STAND_IN.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOM = Path(__file__).parents[4] / "tokengrove" / "rollout" / "harbor" / "room_init.py"
STATE = Path(os.environ.get("STAND_IN", "."))
WITH_VALUE = ("--name", "--cpus", "--memory", "--env", "--user", "--workdir", "--tag")


def main(verb: str, *words: str) -> int:
    with (STATE / "calls").open("a") as calls:
        calls.write(json.dumps([verb, *words]) + "\n")
    options: dict[str, str] = {}
    names = []
    left = list(words)
    while left and left[0].startswith("-"):
        word = left.pop(0)
        if word == "--env":
            names.append(left.pop(0))
        elif word in WITH_VALUE:
            options[word] = left.pop(0)
    return {"build": build, "run": run, "exec": enter, "rm": remove}[verb](options, names, left)


def build(options: dict[str, str], names: list[str], words: list[str]) -> int:
    dockerfile = Path(words[0], "Dockerfile").read_text()
    if "slow" in dockerfile:
        part = STATE / "building.part"
        part.write_text(str(os.getpid()))
        part.rename(STATE / "building")
        signal.pause()
    if "broken" in dockerfile:
        print("the build is broken")
        return 1
    workdir = next(line.split()[1] for line in dockerfile.splitlines() if line.startswith("WORKDIR"))
    (STATE / f"image-{options['--tag']}").write_text(workdir)
    return 0


def run(options: dict[str, str], names: list[str], words: list[str]) -> int:
    folder = STATE / options["--name"]
    folder.mkdir()
    workdir = (STATE / f"image-{words[0]}").read_text()
    order = {"folder": str(folder), "hidden": ["/tmp", "/app", "/tests", "/logs", "/solution"], "kept": []}
    (folder / "order.json").write_text(json.dumps(order))
    command = [sys.executable, "-E", "-S", str(ROOM), str(folder / "order.json")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as room:
        assert room.stdin is not None and room.stdout is not None
        (folder / "pid").write_text(room.stdout.readline().strip())
        (folder / "workdir").write_text(workdir)
        inside(options["--name"], ["mkdir", "-p", workdir], {})
        code = inside(options["--name"], words[1:], {})
        room.stdin.close()  # a container ends with its main process
    return code


def enter(options: dict[str, str], names: list[str], words: list[str]) -> int:
    workdir = options.get("--workdir") or (STATE / words[0] / "workdir").read_text()
    place = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', workdir, *words[1:]]
    user = {"AS_USER": options["--user"]} if "--user" in options else {}
    given = dict(name.split("=", 1) if "=" in name else (name, os.environ[name]) for name in names)
    return inside(words[0], place, {**given, **user})


def inside(name: str, words: list[str], env: dict[str, str]) -> int:
    pid = (STATE / name / "pid").read_text()
    enter = ["nsenter", "--target", pid, "--user", "--mount", "--pid", "--ipc", "--preserve-credentials", "--"]
    path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    return subprocess.run([*enter, *words], env={**path, **env}, check=False).returncode


def remove(options: dict[str, str], names: list[str], words: list[str]) -> int:
    (STATE / words[0] / "removed").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
