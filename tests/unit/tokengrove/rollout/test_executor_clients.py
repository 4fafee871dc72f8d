"""The clients of an executor's episodes: each is shared by a few, and all are closed."""

from __future__ import annotations

from contextlib import ExitStack

from tokengrove.rollout.episodes import Server
from tokengrove.rollout.executors.clients import SHARED_BY, Clients

HERE, THERE = Server("http://127.0.0.1:9"), Server("http://127.0.0.1:9", "another-key")


async def test_a_client_is_shared_by_a_few_episodes_of_one_server() -> None:
    clients = Clients()
    with ExitStack() as episodes:
        first = [episodes.enter_context(clients.client(HERE)) for _ in range(SHARED_BY)]
        assert len(set(first)) == 1
        assert episodes.enter_context(clients.client(HERE)) is not first[0]
        other = episodes.enter_context(clients.client(THERE))
        assert other.admin_key == "another-key"
    with clients.client(HERE) as again:
        assert again.admin_key is None
    await clients.close()
    assert all(client._http.is_closed for client in (*first, other, again))
