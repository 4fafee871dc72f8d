"""The operations of the client, as generators that yield a `Call`, receive its answer and return the result.

Nothing here does I/O, and both clients use it, so the blocking and the asyncio client cannot differ.
"""

from __future__ import annotations

import base64
import json
import re
import warnings
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import Enum
from typing import TypeVar
from urllib.parse import quote

from tokengrove.client.exit_reason import exit_reason
from tokengrove.client.export import Claim, Export, claim_of
from tokengrove.client.options import (
    ClaimOptions,
    Delivery,
    EndOptions,
    ExportOptions,
    GenerateOptions,
    KeyKind,
    ListingFilter,
    ListingPart,
    ParseOptions,
    RewardOptions,
    SessionFilter,
    SessionOptions,
    TokenOptions,
    WithdrawOptions,
)
from tokengrove.client.readers.page import Page
from tokengrove.client.readers.read import check_readable, read_page
from tokengrove.client.run_figures import RunFigures
from tokengrove.client.values import (
    Acknowledged,
    EngineServer,
    EngineState,
    Generated,
    Json,
    Number,
    SessionTree,
    TokenScores,
    engine_of,
    generated_of,
    scores_of,
    servers_of,
    tree_of,
)
from tokengrove.errors import InvalidRequest, NotFound

T = TypeVar("T")


class Repeat(Enum):
    """Whether a call is retried."""

    ALWAYS = "always"  # the server recognises the call by its Idempotency-Key
    READS = "reads"  # it changes nothing, so it needs no key
    UNSENT = "unsent"  # only if it certainly did not arrive: the engine and the mailbox might do it twice
    NEVER = "never"  # turns, which SDKs retry, and calls about the current state


@dataclass(frozen=True, slots=True)
class Call:
    """One request to send. `key`: the key to use; None: the client's admin key, if it has one.

    `headers`: additional headers. All attempts of a call that changes something have the same `idempotency_key` (None:
    a random key). The timeout is `timeout_s` seconds (None: the client's) plus `extra_timeout_s`. The generator
    receives the answer's bytes if `raw`, else its decoded JSON.
    """

    method: str
    path: str
    body: Mapping[str, Json] | None = None
    key: str | None = None
    params: Mapping[str, Json] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    extra_timeout_s: float = 0.0
    raw: bool = False
    repeat: Repeat = Repeat.ALWAYS
    idempotency_key: str | None = None


Steps = Generator[Call, Json, T]
"""An operation: it yields calls, receives their answers and returns a result."""

# Calls that change the engine may wait for requests in flight, or load weights, which takes minutes.
_ENGINE_S = 600.0

GENERATE_S = 3600.0
"""Default timeout of `generate`: answers of reasoning models take many minutes, and may wait for a weight update."""

FORMAT = "npz"
"""Default transfer format: the fastest to read of the formats that need no library and support `include`."""


def one(call: Call) -> Steps[Json]:
    """A single call; its answer is the result."""
    return (yield call)


class StartedSession:
    """The answer of `start_session`: the addresses and keys of one session.

    `base_url` ends in /v1 (OpenAI SDKs), `root_url` does not (Anthropic SDKs). `api_key` is for the agent;
    `control_key` can also set rewards and end the session. `keys_expire_at`: Unix seconds; None: never.
    `feedback_key` sets rewards of turns by their ids, and does nothing else; None until `rotate_keys` makes one.
    """

    def __init__(self, answer: Mapping[str, Json]) -> None:
        self.session_id: str = answer["session_id"]
        self.api_key: str = answer["api_key"]
        self.control_key: str = answer["control_key"]
        self.base_url: str = answer["base_url"]
        self.root_url: str = answer["root_url"]
        self.keys_expire_at: float | None = answer["keys_expire_at"]
        self.feedback_key: str | None = None
        self.ended = False

    def call(self, verb: str, body: Mapping[str, Json], idempotency_key: str | None = None) -> Call:
        path = f"/{session_path(self.session_id)}/rl/{verb}"
        return Call("POST", path, body, self.control_key, idempotency_key=_checked(idempotency_key))


def start(task_id: str, options: SessionOptions, idempotency_key: str | None = None) -> Steps[Mapping[str, Json]]:
    body = {"task_id": task_id, **options}
    answer: Mapping[str, Json] = yield Call(
        "POST", "/rl/start_session", body, idempotency_key=_checked(idempotency_key)
    )
    return answer


def set_reward(
    session: StartedSession, reward: Number | None, options: RewardOptions, idempotency_key: str | None = None
) -> Steps[None]:
    yield session.call("set_reward", _given({"reward": reward, **options}), idempotency_key)


def mark(
    session: StartedSession,
    interaction_id: str | None,
    turn: int | None,
    trainable: bool,
    spans: Sequence[tuple[int, int]] | None,
) -> Steps[None]:
    named = {"interaction_id": interaction_id, "turn": turn}
    yield session.call("mark", _given({**named, "trainable": trainable, "spans": spans}))


def rotate_keys(session: StartedSession, keys: Sequence[KeyKind] | None, key_lifetime_s: float | None) -> Steps[None]:
    """Replace keys and store the new ones. If the secret in the addresses is not replaced, the addresses are kept."""
    answer = yield session.call("rotate_keys", _given({"keys": keys, "key_lifetime_s": key_lifetime_s}))
    session.api_key = answer["api_key"] or session.api_key
    session.control_key = answer["control_key"] or session.control_key
    session.feedback_key = answer.get("feedback_key") or session.feedback_key
    if not keys or "path" in keys:
        session.base_url, session.root_url = answer["base_url"], answer["root_url"]
    session.keys_expire_at = answer["keys_expire_at"]


def end(session: StartedSession, options: EndOptions, idempotency_key: str | None = None) -> Steps[int]:
    answer = yield session.call("end_session", {**options}, idempotency_key)
    session.ended = True
    return int(answer["interaction_count"])


def withdraw(session: StartedSession, options: WithdrawOptions, idempotency_key: str | None = None) -> Steps[int]:
    answer = yield session.call("withdraw_session", {**options}, idempotency_key)
    session.ended = True
    return int(answer["interaction_count"])


def withdraw_session(session_id: str, options: WithdrawOptions) -> Steps[int]:
    """Withdraw a session by its id, with the client's own key."""
    answer = yield Call("POST", f"/{session_path(session_id)}/rl/withdraw_session", {**options})
    return int(answer["interaction_count"])


def leave(session: StartedSession, error: BaseException | None) -> Steps[None]:
    """End the session when its `with` block is left, unless the block ended it."""
    if session.ended:
        return
    options: EndOptions = {} if error is None else {"outcome": "Failed", "exit_reason": exit_reason(error)}
    yield from end(session, options)


def export(
    session_id: str | None,
    session_ids: Sequence[str] | None,
    filter: SessionFilter | None,
    given: ExportOptions,
) -> Steps[Export]:
    """Follow the cursor and join all pages into one `Export`."""
    options, chosen = _divided(given, ExportOptions, filter)
    selection = _given({"session_id": session_id, "session_ids": session_ids, "filter": chosen or None})
    name = _readable(options)
    body = {**selection, **options, "format": name}
    wait_s, result, cursor = given.get("wait_s", 0.0), Export([], {}), None
    while True:
        asked = {**body, **_given({"cursor": cursor})}
        call = Call("POST", "/trajectories/export", asked, extra_timeout_s=wait_s, raw=True, repeat=Repeat.READS)
        page = yield from _page(call, name)
        result.extend(page.export)
        if cursor is None:
            result = replace(result, left_out=page.end.get("left_out", {}))
        cursor = page.end["cursor"]
        if cursor is None:
            return _warned(result)


def outline(session_id: str, filter: SessionFilter | None, given: ExportOptions) -> Steps[dict[str, Json]]:
    options, chosen = _divided(given, ExportOptions, filter)
    body = {"session_id": session_id, **options, **_given({"filter": chosen or None}), "outline": True}
    answer: dict[str, Json] = yield Call("POST", "/trajectories/export", body, repeat=Repeat.READS)
    return answer


def claim(filter: SessionFilter | None, given: ClaimOptions, idempotency_key: str | None = None) -> Steps[Claim]:
    options, chosen = _divided(given, ClaimOptions, filter)
    body, wait_s = _given({**options, "filter": chosen or None}), given.get("wait_s", 0.0)
    call = Call("POST", "/trajectories/claim", body, extra_timeout_s=wait_s, idempotency_key=_checked(idempotency_key))
    how = body.get("export")
    if how is None:
        return claim_of((yield call))
    name = _readable(how)  # checked before the lease
    body["export"] = {**how, "format": name}
    page = yield from _page(replace(call, raw=True), name)
    return claim_of(page.end, _warned(page.export))


def _warned(export: Export) -> Export:
    """Emit the server's first warning: a trainer that reads only samples would not notice it otherwise."""
    told = export.warnings
    if told:
        more = f" (and {len(told) - 1} warnings more in Export.warnings)" if len(told) > 1 else ""
        warnings.warn(told[0] + more, stacklevel=5)
    return export


def _readable(how: Mapping[str, Json]) -> str:
    """Return the requested format. Raises InvalidRequest if it cannot be read here."""
    name = str(how.get("format") or FORMAT)
    check_readable(name)
    return name


def _page(call: Call, format: str) -> Steps[Page]:
    """Send `call` and read its page. Raises InvalidRequest for an incomplete answer."""
    return read_page((yield call), format)


def acknowledge(
    done: Claim | str | None, session_ids: Sequence[str] | None, route: str | None = None
) -> Steps[Acknowledged]:
    """Acknowledge sessions; an empty claim needs no request."""
    if isinstance(done, Claim):
        if done.claim_id is None:
            return Acknowledged((), {})
        session_ids = list(done.sessions) if session_ids is None else session_ids
        done = done.claim_id
    body = _given({"claim_id": done, "session_ids": session_ids, "route": route})
    answer = yield Call("POST", "/trajectories/acknowledge", body)
    return Acknowledged(tuple(answer["acknowledged"]), dict(answer["lost"]))


def annotate(pages: Iterable[Mapping[str, Json]]) -> Steps[int]:
    """Send what a trainer tells, in pages; return the number of turns of which something is new."""
    new = 0
    for body in pages:  # sending one again has no effect
        answer = yield Call("POST", "/trajectories/annotate", body, repeat=Repeat.READS)
        new += answer["new"]
    return new


def webhook_deliveries(state: str, limit: int | None) -> Steps[list[dict[str, Json]]]:
    answer = yield Call("GET", "/rl/webhooks", params=_given({"state": state, "limit": limit}))
    found: list[dict[str, Json]] = answer["deliveries"]
    return found


def resend_webhooks(ids: Sequence[str] | None) -> Steps[int]:
    answer = yield Call("POST", "/rl/webhooks/resend", _given({"ids": ids}))
    return int(answer["resent"])


def trainer_steps(trainer: str | None, before: int | None, limit: int | None) -> Steps[list[dict[str, Json]]]:
    answer = yield Call(
        "GET", "/trajectories/steps", params=_given({"trainer": trainer, "before": before, "limit": limit})
    )
    found: list[dict[str, Json]] = answer["steps"]
    return found


def trainer_step(trainer: str, step: int) -> Steps[list[dict[str, Json]]]:
    """Follow the cursor over all pages."""
    turns: list[dict[str, Json]] = []
    cursor = None
    while True:
        path = f"/trajectories/steps/{quote(trainer, safe='')}/{step}"
        page = yield Call("GET", path, params=_given({"cursor": cursor, "limit": 1000}))
        turns.extend(page["turns"])
        cursor = page["cursor"]
        if cursor is None:
            return turns


def mismatch(trainer: str | None, first_step: int | None, last_step: int | None) -> Steps[dict[str, Json]]:
    asked = _given({"trainer": trainer, "first_step": first_step, "last_step": last_step})
    found: dict[str, Json] = yield Call("GET", "/trajectories/mismatch", params=asked)
    return found


def session_annotations(session_id: str) -> Steps[list[dict[str, Json]]]:
    answer = yield Call("GET", f"/rl/sessions/{session_path(session_id)}/annotations")
    turns: list[dict[str, Json]] = answer["turns"]
    return turns


def sessions(
    filter: SessionFilter | ListingFilter | None = None,
    order: str | None = None,
    include: Sequence[ListingPart] = (),
) -> Steps[list[dict[str, Json]]]:
    """Follow the cursor over all pages."""
    listed: list[dict[str, Json]] = []
    cursor = None
    while True:
        page = yield from session_page(filter, order, include, None, cursor)
        listed.extend(page["sessions"])
        cursor = page["cursor"]
        if cursor is None:
            return listed


def runs(
    filter: SessionFilter | ListingFilter | None, run: str | None, step: str | None
) -> Steps[list[dict[str, Json]]]:
    """Follow the cursor over all pages, and add them up."""
    figures, cursor = RunFigures(), None
    while True:
        asked = {"filter": _as_text(filter), "run": run, "step": step, "limit": 1000, "cursor": cursor}
        page = yield Call("GET", "/rl/runs", params=_given(asked))
        figures.add(page["runs"])
        cursor = page["cursor"]
        if cursor is None:
            return figures.figures()


def session_page(
    filter: SessionFilter | ListingFilter | None,
    order: str | None,
    include: Sequence[ListingPart],
    limit: int | None,
    cursor: str | None,
    partial: bool = False,
) -> Steps[dict[str, Json]]:
    asked = {"filter": _as_text(filter), "order": order, "include": ",".join(include) or None}
    more = {"limit": limit, "cursor": cursor, "partial": "true" if partial else None}
    page: dict[str, Json] = yield Call("GET", "/rl/sessions", params=_given({**asked, **more}))
    return page


def groups(
    filter: SessionFilter | ListingFilter | None, limit: int | None, cursor: str | None
) -> Steps[dict[str, Json]]:
    asked = {"filter": _as_text(filter), "limit": limit, "cursor": cursor}
    page: dict[str, Json] = yield Call("GET", "/rl/groups", params=_given(asked))
    return page


def _as_text(filter: Mapping[str, Json] | None) -> str | None:
    """A filter as text for the query of a listing."""
    return json.dumps(filter) if filter else None


def session_tree(session_id: str, include: Sequence[str]) -> Steps[SessionTree]:
    params = {"include": ",".join(include)} if include else {}
    answer = yield Call("GET", f"/rl/sessions/{session_path(session_id)}", params=params)
    return tree_of(answer)


def delete_session(session_id: str) -> Steps[int]:
    answer = yield Call("DELETE", f"/rl/sessions/{session_path(session_id)}")
    return int(answer["interaction_count"])


def show_turn(
    session_id: str,
    turn: int | str,
    include: Sequence[str],
    page: tuple[int | None, int | None],
    export: TokenOptions,
) -> Steps[dict[str, Json]]:
    given = {name: value if isinstance(value, str) else json.dumps(value) for name, value in export.items()}
    start, limit = page
    params = {
        **({"include": ",".join(include)} if include else {}),
        **_given({"start": start, "limit": limit}),
        **given,
    }
    path = f"/rl/sessions/{session_path(session_id)}/interactions/{quote(str(turn), safe='')}"
    answer: dict[str, Json] = yield Call("GET", path, params=params)
    return answer


def image(session_id: str, digest: str) -> Steps[bytes]:
    path = f"/rl/sessions/{session_path(session_id)}/images/{quote(digest, safe='')}"
    answer: bytes = yield Call("GET", path, raw=True)
    return answer


def reasons() -> Steps[dict[str, dict[str, str]]]:
    answer: dict[str, dict[str, str]] = yield Call("GET", "/rl/reasons")
    return answer


def events_call(kinds: Collection[str] | None) -> Call:
    """The call for the stream of events, which has no end."""
    params = _given({"events": None if kinds is None else ",".join(kinds)})
    return Call("GET", "/rl/events", params=params, repeat=Repeat.NEVER)


def health() -> Steps[dict[str, Json]]:
    answer: dict[str, Json] = yield Call("GET", "/health", repeat=Repeat.NEVER)
    return answer


def ready() -> Steps[dict[str, Json]]:
    answer: dict[str, Json] = yield Call("GET", "/ready", repeat=Repeat.NEVER)
    return answer


def statistics(history_s: float | None) -> Steps[dict[str, Json]]:
    answer: dict[str, Json] = yield Call("GET", "/rl/statistics", params=_given({"history_s": history_s}))
    return answer


def metrics() -> Steps[str]:
    answer: bytes = yield Call("GET", "/metrics", raw=True)
    return answer.decode()


def generate(session: StartedSession | None, prompt_ids: Sequence[int], given: GenerateOptions) -> Steps[Generated]:
    """Sample from token ids: a turn of `session`, or unrecorded."""
    for name in given.keys() - GenerateOptions.__annotations__.keys():
        known = ", ".join(GenerateOptions.__annotations__)
        raise InvalidRequest(f"{name!r} is unknown; the options are {known}", param=name)
    params = dict(given.get("sampling_params") or {})
    for name, value in _given({name: given.get(name) for name in ("stop_token_ids", "ignore_eos")}).items():
        if name in params:
            raise InvalidRequest(f"give {name!r} beside 'sampling_params' or in it, not both", param=name)
        params[name] = value
    images = list(given.get("image_data") or ()) or None
    body = _given(
        {"prompt_ids": prompt_ids, "sampling_params": params, "request_id": given.get("request_id")}
        | {"image_data": images}
    )
    call = _of_tokens(session, "generate", body, given.get("timeout_s", GENERATE_S))
    return generated_of((yield replace(call, headers=_marks(session, given), repeat=Repeat.NEVER)))


def logprobs(fields: Mapping[str, Json]) -> Steps[list[TokenScores]]:
    call = Call("POST", "/v1/logprobs", _given(fields), timeout_s=GENERATE_S, repeat=Repeat.READS)
    return scores_of((yield call))


_MARKS = {
    "agent": "x-tokengrove-agent",
    "state_hash": "x-tokengrove-state-hash",
    "idempotency_key": "idempotency-key",
    "traceparent": "traceparent",
}
"""The options of `generate` that are sent as headers."""

_KEY = re.compile(r"[!-~]{1,255}")
"""The pattern of an idempotency key."""


def _marks(session: StartedSession | None, given: GenerateOptions) -> dict[str, str]:
    """The headers that mark a turn of a session. Raises InvalidRequest for text that a header cannot contain."""
    marks = {name: text for name in _MARKS if (text := str(given.get(name) or ""))}
    for name, text in marks.items():
        if session is None and name != "traceparent":
            raise InvalidRequest(f"{name!r} marks a turn, and outside of a session there is none", param=name)
        if not (text.isascii() and text.isprintable()) or text != text.strip():
            raise InvalidRequest(f"{name!r} must be visible ASCII characters, not {text!r}", param=name)
    return {_MARKS[name]: text for name, text in marks.items()}


def _checked(idempotency_key: str | None) -> str | None:
    """Return the key. Raises InvalidRequest if the server would refuse it."""
    if idempotency_key is not None and not _KEY.fullmatch(idempotency_key):
        raise InvalidRequest(
            f"'idempotency_key' must be 1 to 255 visible ASCII characters, not {idempotency_key!r}",
            param="idempotency_key",
        )
    return idempotency_key


def tokenize(
    session: StartedSession | None, messages: Sequence[Json] | str, options: Mapping[str, Json]
) -> Steps[list[int]]:
    conversation = {"prompt" if isinstance(messages, str) else "messages": messages}
    ids: list[int] = (yield _of_tokens(session, "tokenize", _given({**conversation, **options})))["tokens"]
    return ids


def detokenize(session: StartedSession | None, token_ids: Sequence[int], skip_special_tokens: bool) -> Steps[str]:
    body = {"tokens": token_ids, **({"skip_special_tokens": True} if skip_special_tokens else {})}
    return str((yield _of_tokens(session, "detokenize", body))["prompt"])


def parse(session: StartedSession | None, token_ids: Sequence[int], options: ParseOptions) -> Steps[dict[str, Json]]:
    answer = yield _of_tokens(session, "parse", _given({"tokens": token_ids, **options}))
    message: dict[str, Json] = answer["message"]
    return message


def end_token_ids(session: StartedSession | None) -> Steps[list[int]]:
    path = "" if session is None else f"/{session_path(session.session_id)}"
    answer = yield Call("GET", f"{path}/v1/models", key=None if session is None else session.api_key)
    trained = [model for model in answer["data"] if model.get("kind", "policy") == "policy"]
    if not trained:
        raise NotFound("this session may name no policy: its start did not name one ('models')", param="models")
    return list(trained[0]["end_token_ids"])


def _of_tokens(
    session: StartedSession | None, verb: str, body: Mapping[str, Json], timeout_s: float | None = None
) -> Call:
    """A call that agents also make: with the agent's key in a session, else with the admin key."""
    path, key = ("", None) if session is None else (f"/{session_path(session.session_id)}", session.api_key)
    return Call("POST", f"{path}/v1/{verb}", body, key, timeout_s=timeout_s, repeat=Repeat.READS)


def grant_capacity(n: int, idempotency_key: str | None = None) -> Steps[int]:
    key = _checked(idempotency_key)
    answer = yield Call("POST", "/rl/grant_capacity", {"n": n}, idempotency_key=key)
    return int(answer["capacity"])


def engine(model: str | None = None) -> Steps[EngineState]:
    return engine_of((yield Call("GET", "/engine", params=_given({"model": model}))))


_SAME_TWICE = frozenset({"pause_generation", "continue_generation", "flush_cache"})
"""The idempotent steps of the engine."""


def engine_step(step: str, fields: Mapping[str, Json], model: str | None = None) -> Steps[EngineState]:
    repeat, params = Repeat.READS if step in _SAME_TWICE else Repeat.UNSENT, _given({"model": model})
    body = _given(fields)
    answer = yield Call("POST", f"/engine/{step}", body, params=params, extra_timeout_s=_ENGINE_S, repeat=repeat)
    return engine_of(answer)


def update_weights(path: str, version: int | None, mode: str, model: str | None = None) -> Steps[int]:
    state = yield from engine_step("update_weights", {"path": path, "version": version, "mode": mode}, model)
    return state.version


def models() -> Steps[list[dict[str, Json]]]:
    answer = yield Call("GET", "/engine/models")
    return list(answer["models"])


def add_model(name: str, options: Mapping[str, Json]) -> Steps[list[dict[str, Json]]]:
    call = Call("POST", "/engine/models", {"name": name, **options}, extra_timeout_s=_ENGINE_S, repeat=Repeat.UNSENT)
    return list((yield call)["models"])


def remove_model(name: str) -> Steps[list[dict[str, Json]]]:
    call = Call("DELETE", "/engine/models", {"name": name}, extra_timeout_s=_ENGINE_S, repeat=Repeat.UNSENT)
    return list((yield call)["models"])


def publish_adapter(
    path: str | None, config: Mapping[str, Json] | None, tensors: bytes | None, version: int | None, name: str | None
) -> Steps[int]:
    """With a `version`, the server recognises a repetition by it and by the adapter."""
    sent = None if tensors is None else base64.b64encode(tensors).decode()
    body = _given({"name": name, "path": path, "config": config, "tensors": sent, "version": version})
    repeat = Repeat.UNSENT if version is None else Repeat.READS
    answer = yield Call("POST", "/engine/adapters", body, extra_timeout_s=_ENGINE_S, repeat=repeat)
    return int(answer["version"])


def adapters() -> Steps[list[dict[str, Json]]]:
    answer = yield Call("GET", "/engine/adapters")
    return list(answer["adapters"])


def withdraw_adapter(version: int, name: str | None) -> Steps[dict[str, Json]]:
    body = _given({"name": name, "version": version})
    call = Call("DELETE", "/engine/adapters", body, extra_timeout_s=_ENGINE_S, repeat=Repeat.UNSENT)
    answer: dict[str, Json] = yield call
    return answer


def servers() -> Steps[list[EngineServer]]:
    return servers_of((yield Call("GET", "/engine/servers")))


def change_servers(method: str, url: str) -> Steps[list[EngineServer]]:
    call = Call(method, "/engine/servers", {"url": url}, extra_timeout_s=_ENGINE_S, repeat=Repeat.UNSENT)
    return servers_of((yield call))


def next_request(session_id: str | None, wait_s: float) -> Steps[dict[str, Json]]:
    body = _given({"session_id": session_id, "wait_s": wait_s})
    answer: dict[str, Json] = yield Call("POST", "/mailbox/next", body, extra_timeout_s=wait_s, repeat=Repeat.UNSENT)
    return answer


def deliver(answer: Delivery) -> Steps[str]:
    delivered = yield Call("POST", "/mailbox/deliver", _given(answer), repeat=Repeat.UNSENT)
    return str(delivered["interaction_id"])


def _divided(
    given: Mapping[str, Json], how: type, filter: SessionFilter | None
) -> tuple[dict[str, Json], dict[str, Json]]:
    """Divide keyword arguments into the fields of `how` and of the filter (deprecated since version 0.1.0).

    Raises InvalidRequest for an unknown argument, and for an argument that is also in `filter`.
    """
    filters = SessionFilter.__annotations__
    options = {name: value for name, value in given.items() if name in how.__annotations__}
    others = {name: value for name, value in given.items() if name not in options}
    known = (*how.__annotations__, *filters)
    for name in others:
        if name not in filters:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {_place(near[0], filters)}?" if near else _listed(how.__annotations__, filters)
            raise InvalidRequest(f"{name!r} is unknown; {hint}", param=name)
        if name in (filter or {}):
            raise InvalidRequest(f"{name!r} stands in 'filter' and beside it: give it in 'filter'", param=name)
    if others:
        told = ", ".join(f"{name!r}: ..." for name in others)
        warnings.warn(f"filters belong into 'filter': write filter={{{told}}}", DeprecationWarning, stacklevel=5)
    return options, {**others, **(filter or {})}


def _place(name: str, filters: Collection[str]) -> str:
    return f"{name!r} in 'filter'" if name in filters else repr(name)


def _listed(options: Collection[str], filters: Collection[str]) -> str:
    return f"the options are {', '.join(options)}, those of 'filter' {', '.join(filters)}"


def session_path(session_id: str) -> str:
    """A session id in a URL path. Characters that servers and SDKs do not encode remain."""
    return quote(session_id, safe="/~:@+")


def _given(values: Mapping[str, Json]) -> dict[str, Json]:
    """The entries that are not None: None means the server's default."""
    return {name: value for name, value in values.items() if value is not None}
