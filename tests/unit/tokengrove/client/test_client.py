from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest

from tests.support import real_server
from tokengrove.client import (
    AsyncClient,
    AsyncSession,
    Client,
    EngineServer,
    Sample,
    ServerUnreachable,
    Session,
    operations,
)
from tokengrove.client.options import Format, TokenOptions
from tokengrove.client.transport import Connection, decode
from tokengrove.errors import (
    EngineIncapable,
    InvalidRequest,
    NotFound,
    ProxyError,
    SessionNotFound,
    TooManyRequests,
    Unauthorized,
    UpstreamFailed,
)

ADMIN_KEY = "admin-key-of-the-test"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The real server on a real socket, which the blocking client needs."""
    with real_server(tmp_path, engine_arg=("tokens=8",), admin_key=ADMIN_KEY) as url:
        yield url


@pytest.fixture
def client(server: str) -> Iterator[Client]:
    with Client(server, ADMIN_KEY) as client:
        yield client


def chat(session: Session | AsyncSession, *texts: str) -> str:
    """Send one turn as an agent would, with the session's address and key. Return the interaction's id."""
    messages = [{"role": "user", "content": text} for text in texts]
    response = httpx.post(
        session.base_url + "/chat/completions",
        json={"model": "any", "messages": messages},
        headers={"authorization": f"Bearer {session.api_key}"},
    )
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


def classes(root: type[ProxyError] = ProxyError) -> list[type[ProxyError]]:
    """The public error classes. Other modules, imported or not, derive classes that have no code of their own."""
    public = [below for below in root.__subclasses__() if below.__module__ == ProxyError.__module__]
    return [root, *(found for below in public for found in classes(below))]


def error_of(response: httpx.Response) -> ProxyError:
    with pytest.raises(ProxyError) as caught:
        decode(response)
    return caught.value


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_every_error_class_comes_back_from_its_code_with_the_servers_words(kind: type[ProxyError]) -> None:
    body = {"error": {"message": "said so", "type": "any", "param": "field", "code": kind.code}}
    error = error_of(httpx.Response(kind.status, json=body, headers={"retry-after": "3"}))
    assert type(error) is kind
    assert (str(error), error.message, error.param, error.retry_after_s) == ("said so", "said so", "field", 3.0)


@pytest.mark.parametrize(
    ("status", "content", "kind"),
    [
        (502, b"<html>bad gateway</html>", ServerUnreachable),
        (503, b"<html>no server is ready</html>", ServerUnreachable),
        (501, b"<html>no such thing</html>", EngineIncapable),
        (429, b"[]", TooManyRequests),
        (404, orjson.dumps({"error": "plain"}), NotFound),
        (400, orjson.dumps({"type": "error", "error": {"type": "x", "message": "anthropic"}}), InvalidRequest),
        (418, b"\xff", ProxyError),
    ],
)
def test_an_answer_without_a_known_code_becomes_the_class_of_its_status(
    status: int, content: bytes, kind: type[ProxyError]
) -> None:
    asked = httpx.Request("POST", "http://elsewhere:8080/~secret/rl/set_reward")
    error = error_of(httpx.Response(status, content=content, request=asked))
    assert type(error) is kind
    if kind is ServerUnreachable:
        assert "http://elsewhere:8080 " in error.message and "secret" not in error.message


@pytest.mark.parametrize(("status", "retryable"), [(400, False), (429, True), (502, True), (504, True)])
def test_the_failure_of_an_external_model_comes_back_with_its_status(status: int, retryable: bool) -> None:
    error = error_of(httpx.Response(status, json={"error": {"message": "no room", "code": "upstream_failed"}}))
    assert (type(error), error.status, error.retryable) == (UpstreamFailed, status, retryable)


def test_an_answer_that_is_not_json_is_an_error_that_names_the_address() -> None:
    response = httpx.Response(200, text="hello", request=httpx.Request("GET", "http://elsewhere/health"))
    assert "http://elsewhere/health" in str(error_of(response))


def test_a_dead_address_is_server_unreachable_and_names_it() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with Client(url) as client, pytest.raises(ServerUnreachable, match=url):
            client.health()


def test_the_error_for_an_address_without_a_scheme_names_http() -> None:
    with Client("localhost:8080") as client, pytest.raises(ServerUnreachable, match=r"'localhost:8080'.*http://"):
        client.health()


def test_a_session_is_opened_rewarded_ended_and_exported_with_the_shapes_it_promises(client: Client) -> None:
    with client.session("task", group_id="group", discount=0.5) as session:
        interaction_id = chat(session, "hello")
        session.set_reward(1.0)
    [sample] = client.export(session_id=session.session_id).samples
    assert (sample.session_id, sample.task_id, sample.group_id) == (session.session_id, "task", "group")
    assert sample.interaction_ids == (interaction_id,)
    assert_well_formed(sample)
    assert sample.loss_mask.sum() == 8
    assert sample.rewards.tolist() == [1.0]


def assert_well_formed(sample: Sample) -> None:
    length = len(sample.input_ids)
    for name in ("input_ids", "loss_mask", "versions", "turn_ids"):
        array = getattr(sample, name)
        assert (array.dtype, array.shape) == (np.dtype(np.int32), (length,)), name
    assert (sample.logprobs.dtype, sample.logprobs.shape) == (np.dtype(np.float32), (length,))
    assert (sample.attention_mask.dtype, sample.attention_mask.shape) == (np.dtype(np.bool_), (length,))
    for scalar in (sample.rewards, sample.raw_rewards):
        assert (scalar.dtype, scalar.shape) == (np.dtype(np.float32), (1,))


def test_the_one_line_form_leaves_no_connection_open(server: str) -> None:
    with Client(server, ADMIN_KEY).session("task") as session:
        chat(session, "hello")
    del session
    gc.collect()  # an open socket would warn here, and warnings are errors


def test_leaving_the_block_seals_the_session(client: Client) -> None:
    with client.session("task") as session:
        assert client.session_tree(session.session_id).status == "active"
    assert client.session_tree(session.session_id).status == "ended"


def test_an_exception_ends_the_session_as_failed_with_its_reason_and_goes_on(client: Client) -> None:
    with pytest.raises(ZeroDivisionError), client.session("task") as session:
        raise ZeroDivisionError("the agent broke")
    tree = client.session_tree(session.session_id)
    assert (tree.status, tree.outcome) == ("ended", "Failed")
    assert tree.extra["exit_reason"] == "ZeroDivisionError: the agent broke"


class Untold(Exception):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise KeyError("detail")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(OSError("no \udc80"), "OSError: no \\udc80", id="a lone surrogate, as in the name of a file"),
        pytest.param(OSError("a\0b"), "OSError: a\\x00b", id="NUL"),
        pytest.param(Untold(), "Untold: its text cannot be made (KeyError)", id="no text"),
    ],
)
def test_a_session_ends_whatever_the_text_of_its_exception(client: Client, error: Exception, reason: str) -> None:
    with pytest.raises(type(error)), client.session("task") as session:
        raise error
    tree = client.session_tree(session.session_id)
    assert (tree.status, tree.outcome, tree.extra["exit_reason"]) == ("ended", "Failed", reason)


def test_of_a_huge_exception_the_reason_keeps_beginning_and_end(client: Client) -> None:
    with pytest.raises(ValueError, match=r"^begin"), client.session("task") as session:
        raise ValueError("begin" + 40_000_000 * "x" + "end")  # more than a request body may have
    reason = client.session_tree(session.session_id).extra["exit_reason"]
    assert reason.startswith("ValueError: beginx")
    assert reason.endswith("xend")
    assert len(reason) < 5000


def test_a_session_ended_in_its_block_keeps_that_outcome(client: Client) -> None:
    with client.session("task") as session:
        chat(session, "hello")
        assert session.end(outcome="Timeout", reward=0.25) == 1
    tree = client.session_tree(session.session_id)
    assert tree.outcome == "Timeout"
    assert [node.reward for node in tree.interactions] == [0.25]


def test_a_turn_is_read_by_number_or_id_with_the_parts_that_are_named(client: Client) -> None:
    session = client.start_session("task")
    ids = [chat(session, "hello"), chat(session, "other")]
    shown = client.show_turn(session.session_id, 1, ["messages", "compared"])
    assert shown == client.show_turn(session.session_id, ids[1], ["messages", "compared"])
    assert (shown["messages"], shown["compared"]["nearest"]["interaction_id"]) == (
        *([{"role": "user", "content": "other"}], ids[0]),
    )
    tree = client.session_tree(session.session_id, ["compared"])
    assert [node.compared for node in tree.interactions][1] == shown["compared"]
    assert client.session_tree(session.session_id).interactions[1].compared is None
    with pytest.raises(NotFound):
        client.show_turn(session.session_id, 2)


def test_the_tree_shows_parents_rewards_and_returns(client: Client) -> None:
    with client.session("task") as session:
        first, second = chat(session, "one"), chat(session, "two")
        session.set_reward(rewards={first: 1.0, second: 2.0})
    nodes = client.session_tree(session.session_id).interactions
    assert [(node.id, node.parent_id, node.reward, node.return_) for node in nodes] == [
        (first, None, 1.0, 1.0),
        (second, None, 2.0, 2.0),
    ]


def test_a_turn_is_rewarded_by_its_place_and_marked_with_the_spans_that_count(client: Client) -> None:
    with client.session("task") as session:
        first, second = chat(session, "one"), chat(session, "two")
        session.set_reward(0.5, turn=0)
        session.mark(first, trainable=True, spans=[(0, 1)])
        session.mark(turn=1, trainable=False)
    nodes = client.session_tree(session.session_id).interactions
    assert [node.reward for node in nodes] == [0.5, None]
    export = client.export(session_id=session.session_id, layout="individual")
    assert {sample.interaction_id: int(sample.loss_mask.sum()) for sample in export.samples} == {first: 1, second: 0}


def test_numpy_rewards_are_welcome_and_nan_is_refused_before_it_is_sent(client: Client) -> None:
    with client.session("task") as session:
        chat(session, "hello")
        session.set_reward(np.float32(0.5))
        session.set_reward(step_scores=np.array([0.75], np.float32))
        with pytest.raises(InvalidRequest, match="'reward' cannot be sent"):
            session.set_reward(float("nan"))
    assert [node.reward for node in client.session_tree(session.session_id).interactions] == [0.75]


def test_an_export_follows_the_cursor_over_all_pages(client: Client) -> None:
    ids = []
    for _ in range(3):
        with client.session("task", group_id="paged") as session:
            chat(session, "hello")
        ids.append(session.session_id)
    export = client.export(filter={"group_id": "paged"}, limit=1)
    assert sorted(export.sessions) == sorted(ids) == sorted(sample.session_id for sample in export.samples)


FORMATS = ("json", "jsonl", "areal", "npz", "safetensors", "arrow", "parquet")


@pytest.mark.parametrize("name", [None, *FORMATS])
async def test_both_clients_export_in_any_format_over_pages(server: str, client: Client, name: Format) -> None:
    sampled = {}
    for reward in (1.0, 2.0):
        with client.session("task", group_id="g") as session:
            chat(session, "hello")
            session.set_reward(reward)
        sampled[session.session_id] = reward
    chosen = {} if name is None else {"format": name}
    async with AsyncClient(server, ADMIN_KEY) as other:
        for export in (
            client.export(filter={"group_id": "g"}, limit=1, **chosen),
            await other.export(filter={"group_id": "g"}, limit=1, **chosen),
        ):
            assert {sample.session_id: sample.rewards.tolist() for sample in export.samples} == {
                session_id: [reward] for session_id, reward in sampled.items()
            }
            assert export.sessions.keys() == sampled.keys()
            for sample in export.samples:
                assert_well_formed(sample)
                assert sample.turn_ids.tolist() == [0 if on else -1 for on in sample.loss_mask]


@pytest.mark.parametrize("name", FORMATS)
def test_an_export_in_any_format_says_how_many_validation_sessions_it_left_out(client: Client, name: Format) -> None:
    group = f"validated-{name}"
    for metadata in ({}, {"validate": True}):
        with client.session("task", group_id=group, metadata=metadata):
            pass
    export = client.export(filter={"group_id": group}, format=name)
    assert (len(export.sessions), export.left_out) == (1, {"validation": 1})
    asked = client.export(filter={"group_id": group, "validation": "include"}, format=name, limit=1)
    assert (len(asked.sessions), asked.left_out) == (2, {})
    only = client.export(filter={"group_id": group, "metadata": {"validate": True}}, format=name)
    assert (len(only.sessions), only.left_out) == (1, {})


def test_an_unknown_format_is_refused_before_the_request() -> None:
    with Client("http://127.0.0.1:9") as nobody, pytest.raises(InvalidRequest, match="one of json, jsonl"):
        nobody.export(format="pickle")  # type: ignore[arg-type]


def test_options_of_an_export_arrive_beside_its_filter() -> None:
    steps = operations.export(None, None, {"min_version": 3, "purpose": "agent"}, {"keep": "tail"})
    body = next(steps).body
    assert body == {
        "format": "npz",
        "keep": "tail",
        "filter": {"min_version": 3, "purpose": "agent"},
    }


def test_a_filter_outside_of_filter_still_filters_with_a_warning(client: Client) -> None:
    for group in ("g", "h"):
        with client.session("task", group_id=group) as session:
            chat(session, "hello")
    with pytest.warns(DeprecationWarning, match=r"filter=\{'group_id': \.\.\.\}") as told:
        export = client.export(group_id="g")  # type: ignore[call-arg]
    assert [told[0].filename, len(export.sessions)] == [__file__, 1]
    with pytest.warns(DeprecationWarning):
        claim = client.claim(limit=9, filter={"task_id": "task"}, group_id="h")  # type: ignore[call-arg]
    assert [entry["group_id"] for entry in claim.sessions.values()] == ["h"]


def test_an_unknown_option_is_refused_with_the_nearest_of_options_and_filters() -> None:
    with Client("http://127.0.0.1:9") as nobody:
        with pytest.raises(InvalidRequest, match=r"'reward_scop' is unknown; did you mean 'reward_scope'\?"):
            nobody.export(reward_scop="path")  # type: ignore[call-arg]
        with pytest.raises(InvalidRequest, match="'purposes' is unknown; did you mean 'purpose' in 'filter'"):
            nobody.export(purposes="main")  # type: ignore[call-arg]
        with pytest.raises(InvalidRequest, match=r"'group_sizes' is unknown; did you mean 'group_size'\?"):
            nobody.claim(group_sizes=2)  # type: ignore[call-arg]
        with pytest.raises(InvalidRequest, match=r"'zzz' is unknown; the options are .*, those of 'filter' group_id"):
            nobody.claim(zzz=2)  # type: ignore[call-arg]
        with pytest.raises(InvalidRequest, match="'group_id' stands in 'filter' and beside it"):
            nobody.claim(filter={"group_id": "g"}, group_id="h")  # type: ignore[call-arg]


def test_generation_is_paused_and_resumed(client: Client) -> None:
    assert client.engine().paused is None
    assert client.pause("drain").paused == "drain" == client.engine().paused
    assert client.ready()["status"] == "paused"
    assert client.resume().paused is None
    assert "tokengrove_turns_total" in client.metrics()


def test_weights_are_updated_and_the_state_says_their_version(client: Client) -> None:
    assert client.update_weights("/weights", version=4) == 4
    state = client.flush_cache()
    assert (state.engine, state.version, state.released, state.in_flight) == ("scripted", 4, (), 0)
    assert "update_weights" in state.capabilities


def test_memory_is_released_and_comes_back_in_parts(client: Client) -> None:
    asleep = client.release_memory(["kv_cache", "weights"], mode="drain")
    assert (asleep.released, asleep.paused) == (("kv_cache", "weights"), "drain")
    assert client.resume_memory(["weights"]).released == ("kv_cache",)
    assert (client.resume_memory().released, client.engine().paused) == ((), None)


def test_what_the_engine_cannot_do_is_engine_incapable(client: Client) -> None:
    for attempt in (
        lambda: client.transfer_weights("begin_weight_update", version=2),
        client.servers,
        lambda: client.add_server("http://10.0.0.2:30000"),
        lambda: client.remove_server("http://10.0.0.2:30000"),
    ):
        with pytest.raises(EngineIncapable):
            attempt()


def test_a_server_of_the_pool_that_was_never_reached_has_no_counts() -> None:
    steps = operations.servers()
    assert next(steps) == operations.Call("GET", "/engine/servers")
    reached = {"url": "http://a", "state": "alive", "in_flight": 1, "served": 2, "session_count": 3, "version": 4}
    reached |= {"prompt_tokens": 6, "cached_tokens": 5}
    answer = [{**reached, "failure": None}, {"url": "http://b", "state": "missing", "failure": "refused", "new": 5}]
    with pytest.raises(StopIteration) as returned:
        steps.send({"servers": answer})
    assert returned.value.value == [
        EngineServer("http://a", "alive", None, 1, 2, 3, 4, 6, 5),
        EngineServer("http://b", "missing", "refused", extra={"new": 5}),
    ]


def test_rotated_keys_replace_those_of_the_session(client: Client) -> None:
    with client.session("task") as session:
        before = dict(vars(session))
        session.rotate_keys(["agent"], key_lifetime_s=60)
        assert session.api_key != before["api_key"] and session.keys_expire_at is not None
        for kept in ("control_key", "base_url", "root_url"):
            assert getattr(session, kept) == before[kept]
        chat(session, "hello")
        session.rotate_keys()
        for replaced in ("control_key", "base_url", "root_url"):
            assert getattr(session, replaced) != before[replaced]
        chat(session, "hello", "again")
        session.set_reward(1.0, turn=1)
    assert [node.reward for node in client.session_tree(session.session_id).interactions] == [None, 1.0]


def test_a_turn_is_read_back_by_id_and_by_number(client: Client) -> None:
    with client.session("task") as session:
        interaction_id = chat(session, "hello")
    by_id = client.show_turn(session.session_id, interaction_id, include=["messages", "ids"])
    assert by_id == client.show_turn(session.session_id, 0, include=("messages", "ids"))
    assert len(by_id["output_ids"]) == 8 and by_id["messages"]
    assert "messages" not in client.show_turn(session.session_id, 0)


def test_the_tokens_of_a_turn_are_shown_as_an_export_has_them(client: Client) -> None:
    with client.session("task") as session:
        names = [chat(session, "hello"), chat(session, "again")]
    options: TokenOptions = {"layout": "individual", "train": {"exclude": names[:1]}}
    first, second = client.export(session_id=session.session_id, **options).samples
    for turn, sample in enumerate((first, second)):
        tokens = client.show_turn(session.session_id, turn, ["tokens"], **options)["tokens"]
        states = [(run["state"], run["end"] - run["start"]) for run in tokens["states"]]
        assert tokens["ids"] == sample.input_ids.tolist()
        assert dict(states).get("trained", 0) == sample.loss_mask.sum()
        assert dict(states).get("train", 0) == (0 if turn else 8)


def test_errors_of_the_server_arrive_as_their_classes(client: Client, server: str) -> None:
    with pytest.raises(SessionNotFound):
        client.session_tree("nobody")
    with Client(server) as stranger, pytest.raises(Unauthorized):
        stranger.start_session("task")


def test_all_sessions_are_listed(client: Client) -> None:
    with client.session("one") as first, client.session("two") as second:
        assert [entry["session_id"] for entry in client.sessions()] == [first.session_id, second.session_id]


def test_sessions_are_listed_by_filter(client: Client) -> None:
    for step in (1, 2):
        client.start_session("task", session_id=f"s{step}", metadata={"step": step})
    assert [entry["session_id"] for entry in client.sessions({"metadata": {"step": {"min": 2}}})] == ["s2"]
    assert client.sessions({"status": "ended"}) == []
    with pytest.raises(InvalidRequest, match=r"filter\.stage"):
        client.sessions({"stage": 1})  # type: ignore[typeddict-unknown-key]


def test_the_listing_follows_the_cursor() -> None:
    steps = operations.sessions()
    assert next(steps) == operations.Call("GET", "/rl/sessions")
    follow = steps.send({"sessions": [{"session_id": "a"}], "cursor": "a"})
    assert follow == operations.Call("GET", "/rl/sessions", params={"cursor": "a"})
    with pytest.raises(StopIteration) as returned:
        steps.send({"sessions": [{"session_id": "b"}], "cursor": None})
    assert [entry["session_id"] for entry in returned.value.value] == ["a", "b"]


def test_granting_capacity_sends_n_and_returns_the_remaining_capacity() -> None:
    steps = operations.grant_capacity(2)
    assert next(steps) == operations.Call("POST", "/rl/grant_capacity", {"n": 2})
    with pytest.raises(StopIteration) as returned:
        steps.send({"capacity": 3})
    assert returned.value.value == 3


async def test_the_clients_answer_requests_of_the_mailbox(tmp_path: Path) -> None:
    with real_server(tmp_path, "mailbox") as url, Client(url) as client, ThreadPoolExecutor() as agents:
        with client.session("task") as session:
            asked = agents.submit(chat, session, "hello")
            request = client.next_request(session.session_id, wait_s=60)
            assert (request["status"], request["messages"]) == ("request", [{"role": "user", "content": "hello"}])
            delivered = client.deliver(interaction_id=request["interaction_id"], text="hi", version=3)
            assert asked.result() == delivered
            again = agents.submit(chat, session, "again")
            async with AsyncClient(url) as other:
                turn = (await other.next_request(wait_s=60))["turn"]
                message = {"role": "assistant", "content": "hi"}
                assert await other.deliver(session_id=session.session_id, turn=turn, message=message) == again.result()
        assert client.next_request(session.session_id) == {"status": "ended"}
        assert client.next_request() == {"status": "empty"}


async def test_the_asyncio_client_runs_a_token_loop(server: str) -> None:
    async with AsyncClient(server, ADMIN_KEY) as client, client.session("task", session_id="loop") as session:
        ids = await session.tokenize([{"role": "user", "content": "hi"}])
        made = await session.generate(ids)
        assert await client.parse(made.output_ids) == await session.parse(made.output_ids)
        assert await client.detokenize(made.output_ids) == await session.detokenize(made.output_ids)
        assert (await client.generate(await client.tokenize("a"), sampling_params={"max_tokens": 2})).output_ids
        [node] = (await client.session_tree("loop")).interactions
        assert (node.id, node.output_tokens) == (made.id, len(made.output_ids))


async def test_the_asyncio_client_does_the_same(server: str) -> None:
    async with AsyncClient(server, ADMIN_KEY) as client:
        async with client.session("task") as session:
            interaction_id = chat(session, "hello")
            await session.set_reward(1.0)
            await session.mark(interaction_id, trainable=True)
        with pytest.raises(ZeroDivisionError):
            async with client.session("task") as broken:
                raise ZeroDivisionError
        export = await client.export(session_id=session.session_id)
        tree = await client.session_tree(broken.session_id)
        with pytest.raises(SessionNotFound):
            await client.session_tree("nobody")
    with Client(server, ADMIN_KEY) as blocking:
        [expected] = blocking.export(session_id=session.session_id).samples
    [sample] = export.samples
    assert_well_formed(sample)
    assert sample.input_ids.tolist() == expected.input_ids.tolist()
    assert tree.outcome == "Failed"


def test_a_token_loop_in_a_session_is_recorded_turn_by_turn(client: Client) -> None:
    with client.session("task", session_id="loop") as session:
        messages = [{"role": "user", "content": "hi"}]
        ids, lengths = session.tokenize(messages), list[int]()
        for _ in range(2):
            made = session.generate(np.array(ids), sampling_params={"max_tokens": 5}, ignore_eos=True, request_id="r")
            assert len(made.output_ids) == len(made.logprobs or ()) == len(made.versions) == 5
            assert (made.finish_reason, made.prompt_tokens) == ("length", len(ids))
            messages += [session.parse(made.output_ids), {"role": "user", "content": "more"}]
            known = {"messages": len(messages) - 1, "token_ids": [*ids, *made.output_ids], "output_tokens": 5}
            lengths.append(len(ids))
            ids = session.tokenize(messages, continue_from=known)
            assert ids[: len(known["token_ids"])] == known["token_ids"]
        assert session.detokenize(ids).endswith("<|im_start|>assistant\n")
        assert session.detokenize(ids, skip_special_tokens=True).endswith("assistant\n")
    tree = client.session_tree("loop")
    assert [(node.reason, node.prompt_tokens) for node in tree.interactions] == [
        ("first", lengths[0]),
        ("continued", lengths[1]),
    ]


def test_a_token_loop_of_the_administrator_is_not_recorded(client: Client, server: str) -> None:
    ids = client.tokenize([{"role": "user", "content": "hi"}], chat_template_kwargs={"enable_thinking": False})
    assert client.detokenize(ids).endswith("</think>\n\n")
    made = client.generate(ids, sampling_params={"max_new_tokens": 3}, stop_token_ids=[0], timeout_s=30)
    assert made.id.startswith("gen-")
    assert client.parse(made.output_ids, tool_parser="hermes", prompt_ids=ids)["role"] == "assistant"
    assert client.tokenize("text") == client.tokenize("text", add_special_tokens=False)
    assert client.sessions() == []
    with Client(server) as stranger, pytest.raises(Unauthorized):
        stranger.generate(ids)


def test_an_unknown_or_doubled_option_of_generate_is_refused_before_the_request() -> None:
    with pytest.raises(InvalidRequest, match="'max_tokens' is unknown") as caught:
        next(operations.generate(None, [1], {"max_tokens": 5}))  # type: ignore[typeddict-unknown-key]
    assert caught.value.param == "max_tokens"
    with pytest.raises(InvalidRequest, match="'ignore_eos'"):
        next(operations.generate(None, [1], {"ignore_eos": True, "sampling_params": {"ignore_eos": False}}))


def test_a_generated_turn_is_marked_with_its_agent_and_its_state(client: Client) -> None:
    with client.session("task", session_id="marked") as session:
        ids = session.tokenize([{"role": "user", "content": "hi"}])
        made = session.generate(ids, sampling_params={"max_tokens": 2}, agent="planner", state_hash="5fd9")
        session.generate(ids, sampling_params={"max_tokens": 3})
    turn = client.show_turn("marked", made.id)
    assert (turn["agent"], turn["state_hash"]) == ("planner", "5fd9")
    assert client.show_turn("marked", 1)["agent"] is None
    with pytest.raises(InvalidRequest, match="'agent' must be visible ASCII") as caught:
        session.generate(ids, agent="pl\u00e4ner")
    assert caught.value.param == "agent"
    with pytest.raises(InvalidRequest, match="'state_hash' marks a turn, and outside of a session there is none"):
        client.generate(ids, state_hash="5fd9")


def test_a_generation_may_take_an_hour_but_a_dead_address_is_found_in_a_minute() -> None:
    connection = Connection("http://a", None, 60.0)
    timeout = connection.arguments(next(operations.generate(None, [1], {})))["timeout"]
    assert (timeout.read, timeout.connect) == (3600.0, 60.0)
    timeout = connection.arguments(next(operations.generate(None, [1], {"timeout_s": 5.0})))["timeout"]
    assert (timeout.read, timeout.connect) == (5.0, 5.0)


async def test_two_hundred_generations_of_one_client_run_at_once() -> None:
    """The server answers once all of them have arrived."""
    calls, arrived = 200, 0
    all_here = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        await reader.readuntil(b"\r\n\r\n")
        arrived += 1
        if arrived == calls:
            all_here.set()
        await all_here.wait()
        body = b'{"id": "g", "output_ids": [], "logprobs": [], "versions": [], "finish_reason": "stop", '
        body += b'"prompt_tokens": 1, "cached_tokens": 0}'
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with AsyncClient(f"http://127.0.0.1:{port}", timeout_s=30) as client:
            made = await asyncio.gather(*(client.generate([1], timeout_s=30) for _ in range(calls)))
    assert len(made) == calls


async def test_the_asyncio_client_names_a_dead_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with AsyncClient(url) as client:
            with pytest.raises(ServerUnreachable, match=url):
                await client.health()
