"""The reasons why an episode failed: the cause, and the outcome of its session."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tokengrove.client.exit_reason import exit_reason
from tokengrove.errors import ProxyError
from tokengrove.rollout.episodes.ended import EpisodeEnded, RewardFailed, Unfinished
from tokengrove.rollout.episodes.result import FailureKind
from tokengrove.rollout.failure_log import FailedEpisode
from tokengrove.rollout.failures import AgentFailed, WorkerDied

_KINDS: dict[Unfinished, FailureKind] = {"Failed": "agent", "NoData": "no_data", "Timeout": "timeout"}


@dataclass(frozen=True, slots=True)
class Failure:
    """`kind`, `message` and `traceback` go into the result, `outcome` and `message` into the session."""

    kind: FailureKind
    message: str
    outcome: Unfinished = "Failed"
    traceback: str = ""


def failure_of_agent(error: BaseException, addresses: Sequence[str]) -> Failure:
    """The failure for an exception of an agent or its adapter.

    It is `server` if the exception, or one that caused it, shows that the server failed (status 429 or 5xx) or did not
    answer, also through an SDK on httpx. `addresses`: the addresses of the server.
    """
    if isinstance(error, EpisodeEnded):
        traceback = "" if error.__cause__ is None else FailedEpisode.by(error.__cause__, "").traceback
        return Failure(_KINDS[error.outcome], str(error), error.outcome, traceback)
    if isinstance(error, RewardFailed):
        return Failure("reward", str(error))
    told = str(error) if isinstance(error, AgentFailed) else exit_reason(error)
    if isinstance(error, WorkerDied):
        return Failure("worker", told)
    traceback = FailedEpisode.by(error, "").traceback
    return Failure("server" if _is_of_server(error, addresses) else "agent", told, traceback=traceback)


def _is_of_server(error: BaseException, addresses: Sequence[str]) -> bool:
    hosts = {_host(address) for address in addresses}
    return any(_blames(each, hosts) for each in _chain(error))


def _host(address: object) -> str:
    """The host and port of an address."""
    return urlsplit(str(address)).netloc


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, the exceptions of its group, and their causes and contexts; each once."""
    seen: set[int] = set()
    left: list[BaseException] = [error]
    while left:
        each = left.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        before = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
        left += () if before is None else (before,)


def _blames(error: BaseException, hosts: Collection[str]) -> bool:
    """Whether an exception of the client or of an SDK on httpx shows that the server failed or was not reached."""
    if isinstance(error, ProxyError):
        return error.status >= 500 or error.status == 429
    try:
        request: Any = getattr(error, "request", None)
        response: Any = getattr(error, "response", None)
    except RuntimeError:  # httpx raises it for an error without a request
        return False
    if request is None or _host(getattr(request, "url", "")) not in hosts:
        return False
    status = getattr(response, "status_code", None)
    return status is None or status >= 500 or status == 429
