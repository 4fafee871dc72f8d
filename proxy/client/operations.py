"""Every operation of the server's own endpoints, once: a generator that yields a `Call`, is sent the decoded answer,
and returns the result. Nothing here sends anything, so the blocking and the asyncio client cannot differ.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import quote

from proxy.client.values import (
    Acknowledged,
    Claim,
    ClaimOptions,
    ClaimRequest,
    EndOptions,
    Export,
    ExportOptions,
    ExportRequest,
    Json,
    Number,
    RewardOptions,
    SessionOptions,
    SessionTree,
    claim_of,
    sample_of,
    tree_of,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """One request to send. `key` None means the client's admin key, where it has one."""

    method: str
    path: str
    body: Mapping[str, Json] | None = None
    key: str | None = None
    params: Mapping[str, Json] = field(default_factory=dict)
    extra_timeout_s: float = 0.0


Steps = Generator[Call, Json, T]
"""An operation: yields what to send, is sent the decoded answer, returns the result."""


class StartedSession:
    """What `start_session` answered: the addresses and keys of one session.

    `base_url` ends in /v1 (OpenAI SDKs), `root_url` does not (Anthropic SDKs). `api_key` is for the agent,
    `control_key` also rewards and ends.
    """

    def __init__(self, answer: Mapping[str, Json]) -> None:
        self.session_id: str = answer["session_id"]
        self.api_key: str = answer["api_key"]
        self.control_key: str = answer["control_key"]
        self.base_url: str = answer["base_url"]
        self.root_url: str = answer["root_url"]
        self.ended = False

    def call(self, verb: str, body: Mapping[str, Json]) -> Call:
        return Call("POST", f"/{_quoted(self.session_id)}/rl/{verb}", body, self.control_key)


def start(task_id: str, options: SessionOptions) -> Steps[Mapping[str, Json]]:
    answer: Mapping[str, Json] = yield Call("POST", "/rl/start_session", {"task_id": task_id, **options})
    return answer


def set_reward(session: StartedSession, reward: Number | None, options: RewardOptions) -> Steps[None]:
    yield session.call("set_reward", _given({"reward": reward, **options}))


def end(session: StartedSession, options: EndOptions) -> Steps[int]:
    answer = yield session.call("end_session", {**options})
    session.ended = True
    return int(answer["interaction_count"])


def leave(session: StartedSession, error: BaseException | None) -> Steps[None]:
    """End a session whose block is left, unless the block did it itself."""
    if session.ended:
        return
    failed: EndOptions = {"outcome": "Failed", "exit_reason": f"{type(error).__name__}: {error}"}
    yield from end(session, failed if error else {})


def export(session_id: str | None, session_ids: Sequence[str] | None, request: ExportRequest) -> Steps[Export]:
    """Follows the cursor: all pages are one `Export`."""
    options, chosen = _divided(request, ExportOptions)
    selection = _given({"session_id": session_id, "session_ids": session_ids, "filter": chosen or None})
    body = {**selection, "layout": "concat", **options, "format": "json"}
    result, cursor = Export([], {}), None
    while True:
        asked = {**body, **_given({"cursor": cursor})}
        page = yield Call("POST", "/export_trajectories", asked, extra_timeout_s=request.get("wait_s", 0.0))
        result.samples.extend(sample_of(entry) for entry in page["samples"])
        result.sessions.update(page["sessions"])
        cursor = page.get("cursor")
        if cursor is None:
            return result


def claim(request: ClaimRequest) -> Steps[Claim]:
    options, chosen = _divided(request, ClaimOptions)
    body = _given({**options, "filter": chosen or None})
    answer = yield Call("POST", "/trajectories/claim", body, extra_timeout_s=request.get("wait_s", 0.0))
    return claim_of(answer)


def acknowledge(done: Claim | str | None, session_ids: Sequence[str] | None) -> Steps[Acknowledged]:
    """A claim that holds nothing has nothing to acknowledge."""
    if isinstance(done, Claim):
        if done.claim_id is None:
            return Acknowledged((), {})
        session_ids = done.sessions if session_ids is None else session_ids
        done = done.claim_id
    body = _given({"claim_id": done, "session_ids": session_ids})
    answer = yield Call("POST", "/trajectories/acknowledge", body)
    return Acknowledged(tuple(answer["acknowledged"]), dict(answer["lost"]))


def sessions() -> Steps[list[dict[str, Json]]]:
    """Follows the pages until one is empty."""
    listed: list[dict[str, Json]] = []
    while True:
        after = {"after": listed[-1]["session_id"]} if listed else {}
        page = (yield Call("GET", "/rl/sessions", params=after))["sessions"]
        if not page:
            return listed
        listed.extend(page)


def session_tree(session_id: str) -> Steps[SessionTree]:
    answer = yield Call("GET", f"/rl/sessions/{_quoted(session_id)}")
    return tree_of(answer)


def health() -> Steps[dict[str, Json]]:
    answer: dict[str, Json] = yield Call("GET", "/health")
    return answer


def grant_capacity(n: int) -> Steps[int]:
    answer = yield Call("POST", "/grant_capacity", {"n": n})
    return int(answer["capacity"])


def update_weights(path: str, version: int | None, mode: str) -> Steps[int]:
    body = _given({"path": path, "version": version, "mode": mode})
    answer = yield Call("POST", "/engine/update_weights", body)
    return int(answer["weight_version"])


def _divided(request: Mapping[str, Json], how: type) -> tuple[dict[str, Json], dict[str, Json]]:
    """What says how to export or claim, and what says which sessions."""
    given = dict(request)
    options = {name: given.pop(name) for name in how.__annotations__ if name in given}
    return options, given


def _quoted(session_id: str) -> str:
    return quote(session_id, safe="/~:@+")


def _given(values: Mapping[str, Json]) -> dict[str, Json]:
    """The entries that say something: None is the server's default."""
    return {name: value for name, value in values.items() if value is not None}
