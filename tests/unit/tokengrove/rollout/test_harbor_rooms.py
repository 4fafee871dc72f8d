"""Rooms: an environment with absolute paths of its own, made of this machine, of which nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import until
from tests.unit.tokengrove.rollout.harbor_rooms import room, rooms
from tests.unit.tokengrove.rollout.harbor_tasks import write
from tokengrove.errors import ConfigurationError
from tokengrove.rollout.harbor import BadTask
from tokengrove.rollout.harbor.harbor_sandbox import Blueprint
from tokengrove.rollout.harbor.room import Room
from tokengrove.rollout.harbor.task_config import Environment

__all__ = ["rooms"]
pytestmark = pytest.mark.usefixtures("rooms")


async def told(tmp_path: Path, dockerfile: str, script: str, files: dict[str, str] | None = None, **fields: Any) -> str:
    """What a script prints in the room of a Dockerfile."""
    build = write(tmp_path / "build", {"Dockerfile": dockerfile, **(files or {})})
    place = Room(Blueprint(Environment(), build, {"OF_TASK": "t"}, tmp_path / "task"), **fields)
    await place.start()
    try:
        return (await place.run(script)).output
    finally:
        await place.stop()


DOCKERFILE = r"""# syntax=docker/dockerfile:1
ARG BASE=ubuntu
FROM ${BASE}:24.04 AS first
ENV A="a b" B=$BASE
FROM first
ARG ONE=1
WORKDIR /work
WORKDIR inner
COPY --chmod=755 data/ files/
COPY data/one.txt data/two.txt /both/
ADD data/one.txt /renamed
COPY <<TEXT /text
A is $A
TEXT
RUN echo "$A, $B, $ONE" \
    # a comment between
    > out && mkdir /made
RUN <<'SCRIPT'
echo "from here" >> out
SCRIPT
RUN python3 - << "PY"
open("out", "a").write("from $A\n")
PY
RUN ["touch", "/made/by words"]
ENV PATH=/made:$PATH
CMD ["bash"]
"""


async def test_a_dockerfile_is_followed_without_an_image(tmp_path: Path) -> None:
    files = {"data/one.txt": "1", "data/two.txt": "2", "data/deep/three.txt": "3"}
    script = (
        "pwd; cat out; cat /text; cat files/deep/three.txt /both/one.txt /both/two.txt /renamed; echo; ls /made; "
        'test -x files/one.txt && echo "$A $OF_TASK ${PATH%%:*}"'
    )
    lines = (await told(tmp_path, DOCKERFILE, script, files)).splitlines()
    assert lines == [
        *("/work/inner", "a b, , 1", "from here", "from $A", "A is a b", "3121", "by words", "a b t /made"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("RUN echo it is broken && exit 7", r"Dockerfile, line 2: RUN echo it is .* ended with 7: it is broken"),
        ("COPY absent /x", "line 2: there is no 'absent'"),
        ("COPY ../secret /x", "line 2: there is no|leads out"),
        ("COPY --from=builder /a /b", "line 2: COPY --from=builder needs another image"),
        ("ADD https://example.org/x /x", "needs an image"),
        ("RUN --mount=type=secret,id=a true", "needs an image"),
        ("COPY one", "needs a source and a target"),
        ("FETCH x", "FETCH is not an instruction"),
        ("RUN <<END\nnever", "the here-document 'END' has no end"),
    ],
)
async def test_a_line_that_cannot_be_followed_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "secret").write_text("s")
    with pytest.raises(BadTask, match=message):
        await told(tmp_path, f"FROM ubuntu\n{line}\n", "true")


async def test_run_lines_can_be_tried_or_skipped(tmp_path: Path) -> None:
    dockerfile, said = "FROM ubuntu\nRUN exit 7\nRUN touch /made\n", list[str]()
    shown = "test -e /made && echo made || echo not"
    assert await told(tmp_path, dockerfile, shown, run_lines="try", say=said.append) == "made\n"  # type: ignore[arg-type]
    assert len(said) == 1 and "line 2: RUN exit 7" in said[0]
    assert await told(tmp_path, dockerfile, shown, run_lines="skip") == "not\n"


async def test_rooms_see_neither_each_other_nor_the_homes_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = write(tmp_path / "home", {"secret": "s", "shown/file": "f"})
    monkeypatch.setenv("HOME", str(home))
    first, second = room(tmp_path, visible=[str(home / "shown")]), room(tmp_path)
    await asyncio.gather(first.start(), second.start())
    try:
        script = (
            f"ls {home}; touch /app-of-one /tmp/one /usr/one 2> /dev/null; echo $HOME; ls ~; touch {home}/shown/new"
        )
        assert (await first.run(script)).output.startswith("shown\n/root\n")
        assert (await second.run(f"ls /app-of-one /tmp/one /usr/one {home}/shown 2> /dev/null")).output == ""
    finally:
        await asyncio.gather(first.stop(), second.stop())
    assert "one" not in os.listdir("/usr") and os.listdir(home / "shown") == ["file"]


def _home_with_programs(home: Path) -> Path:
    """One program in a prefix of npm, and one in the folder of a project."""
    files = {"lib/agent/main.sh": "echo from the library", "local/node_modules/own/cli.sh": "echo from a package"}
    write(home, {**files, "secret": "s", "bin/x": "", "local/node_modules/.bin/x": ""})
    for link, target in zip(("bin/agent", "local/node_modules/.bin/cli"), files, strict=True):
        (home / target).chmod(0o755)
        (home / link).symlink_to(os.path.relpath(home / target, (home / link).parent))
    return home


async def test_programs_of_a_home_that_are_on_path_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = _home_with_programs(tmp_path / "home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{home}/bin:{home}/local/node_modules/.bin", prepend=":")
    place = room(tmp_path)
    await place.start()
    try:
        told = await place.run(f"agent; cli; ls {home}")
    finally:
        await place.stop()
    assert told.output.split("\n")[:2] == ["from the library", "from a package"] and "secret" not in told.output


async def test_files_go_in_and_come_out(tmp_path: Path) -> None:
    files = write(tmp_path / "files", {"a/b.txt": "b", "run.sh": "true"})
    (files / "link").symlink_to("a/b.txt")
    (files / "a" / "loop").symlink_to("..")
    (files / "outer").symlink_to(tmp_path / "outside")
    (tmp_path / "outside").write_text("o")
    place = room(tmp_path)
    await place.start()
    try:
        await place.put([(files, "/put/here")], 0o700)
        shown = (await place.run("cd /put/here; readlink link; cat link outer; test -x run.sh && echo x")).output
        assert shown == "a/b.txt\nbox\n"
        await place.run("mkfifo /put/here/pipe; ln -s /etc /put/here/etc")
        await place.get("/put/here", tmp_path / "got", ["*.sh"])
        assert sorted(each.relative_to(tmp_path / "got").as_posix() for each in (tmp_path / "got").rglob("*")) == [
            *("a", "a/b.txt", "outer"),
        ]
        await place.get("/put/here/a/b.txt", tmp_path / "single")
        assert (tmp_path / "single").read_text() == "b"
        with pytest.raises(FileNotFoundError):
            await place.get("/absent", tmp_path / "none")
    finally:
        await place.stop()


LEFT = """
import asyncio, os, sys
from pathlib import Path
from tests.unit.tokengrove.rollout.harbor_rooms import room

async def main():
    place = room(Path(sys.argv[1]))
    await place.start()
    await place.run("env -i setsid sh -c 'sleep 1000; : " + sys.argv[2] + "' > /dev/null 2>&1 &")
    print(place._finalizer.peek()[2][1], flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_nothing_is_left_of_a_room_whose_owner_was_killed(tmp_path: Path) -> None:
    mark = f"owner-{os.getpid()}"
    folder = _killed_owner(tmp_path, mark)
    await until(lambda: not _running(mark) and not folder.exists())


def _killed_owner(tmp_path: Path, mark: str) -> Path:
    """Kill a program that has a room with a running process in it; return the room's folder."""
    words = [sys.executable, "-c", LEFT, str(tmp_path), mark]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert folder.is_dir() and _running(mark) > 1
        owner.send_signal(signal.SIGKILL)
    return folder


def _running(mark: str) -> int:
    found = subprocess.run(["pgrep", "-c", "-f", mark], capture_output=True, text=True, check=False)
    return int(found.stdout)


async def test_a_machine_without_rooms_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"nsenter.*use sandbox=docker"):
        room(tmp_path)


async def test_a_room_that_cannot_be_made_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = write(tmp_path, {"broken.py": "print('error: user namespaces are not allowed here')"}) / "broken.py"
    monkeypatch.setattr("tokengrove.rollout.harbor.room_init.__file__", str(broken))
    place = room(tmp_path)
    with pytest.raises(ConfigurationError, match=r"user namespaces are not allowed here; use sandbox=docker"):
        await place.start()
    await place.stop()
