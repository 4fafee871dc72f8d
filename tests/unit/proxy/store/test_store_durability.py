"""Once an append has resolved, its interaction is on the disk, even if the process is then killed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.store.inspection import inspecting
from proxy.store.store import Store
from tokengrove.errors import ConfigurationError
from tokengrove.reasons import Status

REPOSITORY = Path(__file__).resolve().parents[4]

PREAMBLE = """
import asyncio, os, resource, signal, sys, time
from array import array
from tokengrove.errors import StoreUnavailable
from tokengrove.errors import ConfigurationError
from proxy.store.store import Store
from proxy.types import *

def node(name, content="hi"):
    return Interaction(id=name, session_id="s", parent_id=None, aligned=False, reason=Reason.FIRST, api=Api.CHAT,
        status=Status.COMPLETE, new_messages=(Message(Role.USER, content),), output=Message(Role.ASSISTANT, "yes"),
        prefix_length=0, prompt_suffix=array("i", [1]), output_ids=array("i", [2]), logprobs=array("f", [-1]),
        versions=((1, 0),), finish_reason=FinishReason.STOP, sampling=SamplingParams())

def say(*words):
    print(*words, flush=True)
"""

APPENDS_FOR_EVER = """
async def main():
    store = Store.open(sys.argv[1])
    await store.starts.create_session(SessionRecord("s"))
    async def append_all(task):
        for n in range(10**9):
            await store.turns.append(node(f"{task}-{n}"))
            say(f"{task}-{n}")
    await asyncio.gather(*(append_all(task) for task in range(8)))
asyncio.run(main())
"""

APPENDS_IMAGES_FOR_EVER = """
import hashlib
def photo(n):
    data = n.to_bytes(4, "big") * 25_000
    return ImageFile(hashlib.sha256(data).hexdigest(), "image/png", 1, 1, data)

async def main():
    store = Store.open(sys.argv[1])
    await store.starts.create_session(SessionRecord("s"))
    async def append_all(task):
        for n in range(10**9):
            files = [photo(n), photo(10**6 + 8 * n + task)]  # one that all tasks have, and one of its own
            turn = node(f"{task}-{n}")
            turn.images = tuple(PlacedImage(file.digest, 0, 1) for file in files[:1])
            await store.turns.append(turn, None, files)
            say(*(file.digest for file in files))
    await asyncio.gather(*(append_all(task) for task in range(4)))
asyncio.run(main())
"""

FORKS = """
async def main():
    store = Store.open(sys.argv[1])
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    say(child)
    await asyncio.sleep(60)
asyncio.run(main())
"""

FILLS_THE_DISK = """
async def main():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = Store.open(sys.argv[1])
    await store.starts.create_session(SessionRecord("s"))
    await store.turns.append(node("before"))
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        await store.turns.append(node("big", os.urandom(500_000).hex()))
    except StoreUnavailable as error:
        say("refused")
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    await store.turns.append(node("after"))
    say(*(each.id for each in await store.recordings.load_interactions("s")))
    await store.close()
asyncio.run(main())
"""


@contextmanager
def running(script: str, url: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", PREAMBLE + script, url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


async def test_kill_9_loses_nothing_that_was_said_to_be_stored(url: str) -> None:
    with running(APPENDS_FOR_EVER, url) as process:
        said = [next_line(process) for _ in range(100)]
        process.send_signal(signal.SIGKILL)
        assert process.stdout is not None
        said += process.stdout.readlines()
    store = Store.open(url)
    stored = await store.recordings.load_interactions("s", statuses={Status.COMPLETE})
    await store.close()
    assert {line.strip() for line in said if line.endswith("\n")} <= {node.id for node in stored}
    assert [node.seq for node in stored] == list(range(len(stored)))


async def test_kill_9_loses_no_image_of_a_turn_that_was_said_to_be_stored(url: str) -> None:
    with running(APPENDS_IMAGES_FOR_EVER, url) as process:
        said = [next_line(process) for _ in range(40)]
        process.send_signal(signal.SIGKILL)
        assert process.stdout is not None
        said += process.stdout.readlines()
    store = Store.open(url)
    digests = {digest for line in said if line.endswith("\n") for digest in line.split()}
    read = {file.digest: file.data for file in await store.images.read(sorted(digests))}
    turns = await store.recordings.load_interactions("s")
    await store.close()
    assert read.keys() == digests
    assert all(hashlib.sha256(data).hexdigest() == digest for digest, data in read.items())
    with inspecting(url) as inspection:
        assert inspection.faults() == []
        [session] = inspection.sessions()
    assert {image.digest for turn in turns for image in turn.images} <= session.images


async def test_the_lock_ends_with_the_server_even_if_its_forked_child_lives(url: str) -> None:
    with running(FORKS, url) as process:
        child = int(next_line(process))
        process.kill()
        process.wait()
        try:
            store = await opened_soon(url)
            await store.close()
        finally:
            os.kill(child, signal.SIGKILL)


async def opened_soon(url: str) -> Store:
    """The child releases the lock when it first runs, which may be after the end of its parent."""
    for _ in range(100):
        try:
            return Store.open(url)
        except ConfigurationError:
            await asyncio.sleep(0.05)
    return Store.open(url)


def test_a_full_disk_refuses_one_append_and_later_ones_are_stored(url: str) -> None:
    with running(FILLS_THE_DISK, url) as process:
        out, _ = process.communicate(timeout=60)
        assert out == "refused\nbefore after\n"
        assert process.returncode == 0
