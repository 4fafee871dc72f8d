"""A session that is started and deleted before a run: what a server refuses in one, it would refuse in all."""

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
    """Raise ConfigurationError if the server refuses the key, the sampling, the limits or another field of the run's
    sessions.

    A server that has no room for a session now is not asked again: that is no fault of the options.
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
    with suppress(ProxyError):  # it is withdrawn with what else a run leaves
        await client.delete_session(session.session_id)
