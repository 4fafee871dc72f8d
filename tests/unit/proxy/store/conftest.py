"""Fixtures: a store on a new SQLite or PostgreSQL database, and builders of sessions and interactions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from proxy.store.store import Store
from proxy.types import Api, Interaction, Message, Role, SamplingParams, SessionRecord, ids_of
from tokengrove.reasons import FinishReason, Reason, Status


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of a new SQLite file, for tests of SQLite alone."""
    return f"sqlite:///{tmp_path / 'grove.db'}"


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    opened = Store.open(database_url, migrate=True)
    yield opened
    await opened.close()


@pytest.fixture
async def session(store: Store) -> SessionRecord:
    record = SessionRecord("task-0", task_id="task")
    await store.starts.create_session(record)
    return record


@pytest.fixture
def node() -> Callable[..., Interaction]:
    """Builds a small complete interaction of session `task-0`; keyword arguments replace fields."""

    def build(name: str = "chatcmpl-1", **fields: object) -> Interaction:
        values: dict[str, object] = {
            "session_id": "task-0",
            "parent_id": None,
            "aligned": False,
            "reason": Reason.FIRST,
            "api": Api.CHAT,
            "status": Status.COMPLETE,
            "new_messages": (Message(Role.USER, "hello"),),
            "output": Message(Role.ASSISTANT, "hi"),
            "prefix_length": 0,
            "prompt_suffix": ids_of([1, 2, 3]),
            "output_ids": ids_of([4, 5]),
            "logprobs": type(ids_of())("f", [-0.5, -0.25]),
            "versions": ((2, 7),),
            "finish_reason": FinishReason.STOP,
            "sampling": SamplingParams(),
        }
        return Interaction(id=name, **(values | fields))  # type: ignore[arg-type]

    return build
