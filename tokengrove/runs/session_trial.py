"""A trial session, started and deleted before a run: a server that refuses one session would refuse all."""

from __future__ import annotations

from contextlib import suppress

from tokengrove.client import AsyncClient
from tokengrove.client.options import SessionOptions
from tokengrove.errors import ConfigurationError, Forbidden, InvalidRequest, ProxyError, Unauthorized
from tokengrove.rollout.run_options import RunOptions
from tokengrove.rollout.session_start import unused_session_id
from tokengrove.runs.slots import RUN

_NAME = "trial"


async def try_session(client: AsyncClient, options: RunOptions, run_id: str) -> None:
    """Raise ConfigurationError if the server refuses the key or a field of the run's sessions.

    Other errors of the server, such as a limit of live sessions, are ignored: the options are not their cause.
    """
    fields: SessionOptions = {**options.session_fields(), "session_id": unused_session_id(_NAME)}
    fields["metadata"] = {**fields.get("metadata", {}), RUN: run_id, "validate": True}
    try:
        session = await client.start_session(_NAME, retry_s=0.0, **fields)
    except InvalidRequest as error:
        raise ConfigurationError(f"the server refuses sessions with these options: {error.message}") from None
    except (Unauthorized, Forbidden) as error:
        raise ConfigurationError(f"--admin-key: the server starts no sessions for it: {error.message}") from None
    except ProxyError:
        return
    with suppress(ProxyError):  # it is withdrawn with other leftovers of a run
        await client.delete_session(session.session_id)
