"""Both clients have the same documented methods, and every control endpoint of the server has one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from starlette.routing import Route

from proxy.api import delivery, listing_request, reward_request, session_request
from proxy.app import build_app
from proxy.engine.interface import MEMORY_TAGS, PauseMode, WeightTransfer
from proxy.sessions.issued_keys import KeyKind
from proxy.settings import Settings
from tests.samples import sample
from tokengrove.client import AsyncClient, AsyncSession, Client, Session, options
from tokengrove.client.operations import Call

KEYS = {"session_id": "s", "api_key": "a", "control_key": "c", "base_url": "b", "root_url": "r", "keys_expire_at": None}

# A method of the clients for each endpoint.
METHODS: dict[tuple[str, str], Callable[[Client, Session], object]] = {
    ("POST", "/rl/start_session"): lambda client, session: client.start_session("task"),
    ("GET", "/rl/reasons"): lambda client, session: client.reasons(),
    ("GET", "/rl/sessions"): lambda client, session: client.sessions(),
    ("GET", "/rl/runs"): lambda client, session: client.runs(),
    ("GET", "/rl/groups"): lambda client, session: client.groups(),
    ("GET", "/rl/sessions/{session}"): lambda client, session: client.session_tree("s"),
    ("DELETE", "/rl/sessions/{session}"): lambda client, session: client.delete_session("s"),
    ("GET", "/rl/sessions/{session}/images/{digest}"): lambda client, session: client.image("s", "0" * 64),
    ("GET", "/rl/sessions/{session}/interactions/{interaction}"): lambda client, session: client.show_turn("s", 0),
    ("GET", "/rl/statistics"): lambda client, session: client.statistics(),
    ("GET", "/rl/events"): lambda client, session: next(client.events()),
    ("POST", "/rl/grant_capacity"): lambda client, session: client.grant_capacity(),
    ("POST", "/{session}/rl/set_reward"): lambda client, session: session.set_reward(1.0),
    ("POST", "/{session}/rl/mark"): lambda client, session: session.mark(turn=0, trainable=True),
    ("POST", "/{session}/rl/rotate_keys"): lambda client, session: session.rotate_keys(),
    ("POST", "/{session}/rl/end_session"): lambda client, session: session.end(),
    ("POST", "/{session}/rl/withdraw_session"): lambda client, session: session.withdraw(),
    ("POST", "/trajectories/export"): lambda client, session: client.export(),
    ("POST", "/trajectories/claim"): lambda client, session: client.claim(),
    ("POST", "/trajectories/acknowledge"): lambda client, session: client.acknowledge("c"),
    ("POST", "/trajectories/annotate"): lambda client, session: client.annotate(
        [sample([1], [2])], 1, {}, {"loss": [0.5]}
    ),
    ("GET", "/rl/webhooks"): lambda client, session: client.webhook_deliveries(),
    ("POST", "/rl/webhooks/resend"): lambda client, session: client.resend_webhooks(),
    ("GET", "/trajectories/steps"): lambda client, session: client.trainer_steps(),
    ("GET", "/trajectories/steps/{trainer}/{step}"): lambda client, session: client.trainer_step("t", 1),
    ("GET", "/trajectories/mismatch"): lambda client, session: client.mismatch(),
    ("GET", "/rl/sessions/{session}/annotations"): lambda client, session: client.annotations("s"),
    ("POST", "/mailbox/next"): lambda client, session: client.next_request(),
    ("POST", "/mailbox/deliver"): lambda client, session: client.deliver(interaction_id="i", text="t"),
    ("POST", "/v1/generate"): lambda client, session: client.generate([1]),
    ("POST", "/v1/logprobs"): lambda client, session: client.logprobs([1, 2]),
    ("POST", "/v1/tokenize"): lambda client, session: client.tokenize("a"),
    ("POST", "/v1/detokenize"): lambda client, session: client.detokenize([1]),
    ("POST", "/v1/parse"): lambda client, session: client.parse([1]),
    ("POST", "/{session}/v1/generate"): lambda client, session: session.generate([1]),
    ("POST", "/{session}/v1/tokenize"): lambda client, session: session.tokenize("a"),
    ("POST", "/{session}/v1/detokenize"): lambda client, session: session.detokenize([1]),
    ("POST", "/{session}/v1/parse"): lambda client, session: session.parse([1]),
    ("GET", "/v1/models"): lambda client, session: client.end_token_ids(),
    ("GET", "/{session}/v1/models"): lambda client, session: session.end_token_ids(),
    ("GET", "/health"): lambda client, session: client.health(),
    ("GET", "/ready"): lambda client, session: client.ready(),
    ("GET", "/metrics"): lambda client, session: client.metrics(),
    ("GET", "/engine"): lambda client, session: client.engine(),
    ("POST", "/engine/pause_generation"): lambda client, session: client.pause(),
    ("POST", "/engine/continue_generation"): lambda client, session: client.resume(),
    ("POST", "/engine/update_weights"): lambda client, session: client.update_weights("w"),
    ("POST", "/engine/release_memory"): lambda client, session: client.release_memory(),
    ("POST", "/engine/resume_memory"): lambda client, session: client.resume_memory(),
    ("POST", "/engine/flush_cache"): lambda client, session: client.flush_cache(),
    ("GET", "/engine/models"): lambda client, session: client.models(),
    ("POST", "/engine/models"): lambda client, session: client.add_model("a"),
    ("DELETE", "/engine/models"): lambda client, session: client.remove_model("a"),
    ("GET", "/engine/adapters"): lambda client, session: client.adapters(),
    ("POST", "/engine/adapters"): lambda client, session: client.publish_adapter("a"),
    ("DELETE", "/engine/adapters"): lambda client, session: client.withdraw_adapter(1),
    ("GET", "/engine/servers"): lambda client, session: client.servers(),
    ("POST", "/engine/servers"): lambda client, session: client.add_server("http://a"),
    ("DELETE", "/engine/servers"): lambda client, session: client.remove_server("http://a"),
    **{
        ("POST", f"/engine/{step}"): lambda client, session, step=step: client.transfer_weights(step)  # type: ignore[misc]
        for step in WeightTransfer
    },
}

# Why an endpoint has no method, by the end of its path.
WITHOUT = {
    r"^/(ui(/.*)?)?": "the page, which browsers load",
    r"/(chat/completions|responses(/input_tokens)?|messages(/count_tokens)?)": "the SDKs of agents call it",
    r"/models/\{model\}(:\w+)?": "the SDKs of agents call it",
    r"^(/\{session\})?/models(?<!engine/models)": "the same endpoint below /v1 has a method",
    r"/v1beta/models": "Google's SDKs list models there",
    r"/completions": "those who render by themselves call it as they call vLLM",
    r"^(/\{session\})?/(generate|tokenize|detokenize|parse)": "the same endpoint below /v1 has a method",
    r"^/(export_trajectories|grant_capacity)": "AReaL's name of an endpoint that has a method",
    r"^/rl/(set_reward|mark|rotate_keys|(end|withdraw)_session)": "the endpoint with the session in its path has one",
}


class Sent(Exception):
    """Raised instead of sending a call."""


def endpoints(folder: Path) -> set[tuple[str, str]]:
    app = build_app(Settings(engine="scripted", database_url=f"sqlite:///{folder / 't.db'}"))
    found: set[tuple[str, str]] = set()
    for route in app.routes:
        assert isinstance(route, Route)
        found |= {(method, route.path.replace(":path", "")) for method in (route.methods or set()) - {"HEAD"}}
    return found


def reason(path: str) -> str | None:
    return next((why for end, why in WITHOUT.items() if re.search(f"{end}$", path)), None)


def test_every_endpoint_has_a_method_of_the_client_or_a_reason_to_have_none(tmp_path: Path) -> None:
    there = endpoints(tmp_path)
    assert METHODS.keys() <= there, METHODS.keys() - there
    for method, path in there - METHODS.keys():
        assert reason(path), (method, path)
    for _, path in METHODS:
        assert not reason(path), path


@pytest.mark.parametrize("endpoint", METHODS, ids=lambda endpoint: " ".join(endpoint))
def test_the_method_of_an_endpoint_calls_it(endpoint: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Call] = []

    def send(client: Client, call: Call) -> Any:
        calls.append(call)
        raise Sent

    monkeypatch.setattr(Client, "_send", send)
    monkeypatch.setattr(Client, "_open", send)
    with Client("http://server") as client, pytest.raises(Sent):
        METHODS[endpoint](client, Session(client, KEYS))
    names = {"session": "s", "interaction": "0", "digest": "0" * 64, "trainer": "t", "step": "1"}
    assert [(call.method, call.path) for call in calls] == [(endpoint[0], endpoint[1].format(**names))]


def test_the_options_of_a_method_are_the_fields_of_its_endpoint() -> None:
    """The others are written from the options. `request_id` is an older name."""
    fields = {
        options.RewardOptions: {*reward_request.REWARD_FIELDS} - {"reward"},
        options.EndOptions: {*session_request._END_FIELDS},
        options.WithdrawOptions: {*session_request._WITHDRAWAL_FIELDS},
        options.Delivery: {*delivery._FIELDS} - {"request_id"},
    }
    for kind, names in fields.items():
        assert get_type_hints(kind).keys() == names, kind.__name__
    assert set(get_args(options.KeyKind)) == set(KeyKind)
    assert set(get_args(options.ListingPart)) == set(listing_request.Part)
    assert set(get_args(options.PauseMode)) == set(PauseMode)
    assert set(get_args(options.MemoryTag)) == set(MEMORY_TAGS)
    assert set(get_args(options.TransferStep)) == set(WeightTransfer)


def test_both_clients_have_the_same_methods_signatures_and_docstrings() -> None:
    assert surface(Client) == surface(AsyncClient)
    assert surface(Session) == surface(AsyncSession)


def test_every_method_of_both_clients_is_documented() -> None:
    for kind in (Client, Session, AsyncClient, AsyncSession):
        for name, method in methods(kind).items():
            assert inspect.getdoc(method), f"{kind.__name__}.{name}"


def methods(kind: type) -> dict[str, Callable[..., object]]:
    return {name.replace("aclose", "close"): m for name, m in vars(kind).items() if not name.startswith("_")}


def surface(kind: type) -> dict[str, tuple[object, str | None]]:
    """By name, the parameters with defaults and annotations, the returned type and the docstring."""
    return {name: (plain(inspect.signature(method)), inspect.getdoc(method)) for name, method in methods(kind).items()}


def plain(signature: inspect.Signature) -> tuple[list[inspect.Parameter], str]:
    return list(signature.parameters.values()), str(signature.return_annotation).replace("Async", "")
