"""Why an episode was not played to its end: who is to blame, and how its session ends."""

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
    """`kind`, `message` and `traceback` are those of the result, `outcome` and `message` those of the session."""

    kind: FailureKind
    message: str
    outcome: Unfinished = "Failed"
    traceback: str = ""


def failure_of_agent(error: BaseException, addresses: Sequence[str]) -> Failure:
    """The failure that an exception of an agent, or of what adapts it, stands for.

    The server is to blame for its own errors and if no answer came from it, whichever SDK says so. `addresses` are
    those that it is reached by.
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
    """The host of an address with its port."""
    return urlsplit(str(address)).netloc


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, those of its group, and those that they were raised from or while handling; each once."""
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
    """Whether the server failed, or was not reached, by what its client or an SDK on httpx raised."""
    if isinstance(error, ProxyError):
        return error.status >= 500 or error.status == 429
    try:
        request: Any = getattr(error, "request", None)
        response: Any = getattr(error, "response", None)
    except RuntimeError:  # httpx raises it where an error has no request
        return False
    if request is None or _host(getattr(request, "url", "")) not in hosts:
        return False
    status = getattr(response, "status_code", None)
    return status is None or status >= 500 or status == 429
