"""The resource use of each sender, in all resources that are shared fairly.

A sender is a session, or until the session is known, a key or only a host. The host is the address that a request comes
from; for IPv6, it is the /64 network of the address.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import NamedTuple


class Sender(NamedTuple):
    """A sender of requests. `host`: the result of `host_of`. `name`: a session's id, else a key; "" without either."""

    host: str = ""
    name: str = ""


class Tally:
    """An amount for each sender and for each host. Zero amounts are removed."""

    __slots__ = ("of", "of_host", "total")

    def __init__(self) -> None:
        self.of: dict[Sender, int] = {}
        self.of_host: dict[str, int] = {}
        self.total = 0

    def add(self, sender: Sender, amount: int) -> None:
        """Add to the amount of a sender."""
        of, of_host, host = self.of, self.of_host, sender.host
        self.total += amount
        of[sender] = of.get(sender, 0) + amount
        of_host[host] = of_host.get(host, 0) + amount
        if not of[sender]:
            del of[sender]
            if not of_host[host]:
                del of_host[host]

    def largest(self, most: int) -> list[tuple[Sender, int]]:
        """The `most` senders with the largest amounts."""
        return sorted(self.of.items(), key=lambda entry: -entry[1])[:most]


class Senders:
    """The current resource use of senders in one process.

    `running`: choices that are generated and committed. `queued`: choices that wait for a place among them. `work`:
    calls that wait for a worker thread or run in one. `body_bytes`: bytes of request bodies. `wrong_keys`: requests
    with a wrong key whose answers are delayed. `connections`: connections of clients, by host only.
    """

    def __init__(self) -> None:
        self.running, self.queued, self.work = Tally(), Tally(), Tally()
        self.body_bytes, self.wrong_keys, self.connections = Tally(), Tally(), Tally()


@lru_cache(4096)
def host_of(address: str) -> str:
    """The name of the host that an address belongs to."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
