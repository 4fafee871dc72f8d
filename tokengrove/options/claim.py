"""The options of a claim: which ended sessions a trainer leases, for how long, and their samples."""

from __future__ import annotations

from dataclasses import dataclass

from tokengrove.options.export import SampleOptions
from tokengrove.options.option import option
from tokengrove.options.session import SessionFilter


@dataclass(frozen=True, kw_only=True)
class ClaimOptions:
    """What to claim. Repeating a claim with its `claim_id` returns what it holds and renews the lease."""

    limit: int = option(1, "The most sessions to claim.", least=1, most=1000)
    group_size: int | None = option(
        None,
        "Claim only groups of so many sessions that have all ended, each group whole.",
        least=1,
        most=1000,
        otherwise="that of the sessions' start",
    )
    lease_s: float = option(
        600.0, "Length of the lease; 0 gives the sessions back.", unit="seconds", least=0.0, most=7 * 86_400.0
    )
    wait_s: float = option(0.0, "How long to wait for a first session.", unit="seconds", least=0.0, most=600.0)
    consumer: str | None = option(None, "Prefix of the claim's id, so that others see who holds a session.")
    claim_id: str | None = option(None, "Id of this claim, to repeat it or to renew its lease.", otherwise="a new id")
    renew: bool = option(False, "Renew the lease of `claim_id` and claim nothing new.")
    filter: SessionFilter = option(SessionFilter(), "Which sessions.", note="[Filters](#filters).")
    route: str | None = option(
        None,
        "Claim the sessions of this trained route, and its samples.",
        otherwise="the only one",
        note="Each trained route has [a queue of its own](models.md#what-is-recorded-and-exported).",
    )
    export: SampleOptions | None = option(None, "Answer with samples, made with these options of an export.")
