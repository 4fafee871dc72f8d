"""The asyncio client: it only sends the calls that `operations` yields."""

from __future__ import annotations

# blocking: import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Literal, TypeVar, Unpack, overload

import httpx

from tokengrove.client import operations
from tokengrove.client.asgi import ASGIApp
from tokengrove.client.certificates import trusted
from tokengrove.client.export import Claim, Export
from tokengrove.client.http_clients import (
    AGENT_TIMEOUT_S,
    AsyncTransport,
    Library,
    async_http_client,
)
from tokengrove.client.operations import StartedSession, Steps
from tokengrove.client.options import (
    ClaimOptions,
    Delivery,
    EndOptions,
    ExportOptions,
    GenerateOptions,
    KeyKind,
    ListingFilter,
    ListingPart,
    MemoryTag,
    ParseOptions,
    PauseMode,
    RewardOptions,
    SessionFilter,
    SessionOptions,
    TokenOptions,
    TransferStep,
    WithdrawOptions,
)
from tokengrove.client.retries import LEAVE_S, RETRY_S, Attempts
from tokengrove.client.server_events import EventKind, EventReader, ServerEvent
from tokengrove.client.token_streams import Align, Scalars, Streams, bodies
from tokengrove.client.transport import LIMITS, TIMEOUT_S, Connection, decode
from tokengrove.client.values import (
    Acknowledged,
    EngineServer,
    EngineState,
    Generated,
    Json,
    Number,
    Sample,
    SessionTree,
    TokenScores,
)
from tokengrove.errors import ProxyError

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")


class AsyncSession(StartedSession):
    """A live session, as `AsyncClient.session` and `AsyncClient.start_session` return it."""

    def __init__(self, client: AsyncClient, answer: Mapping[str, Json]) -> None:
        super().__init__(answer)
        self._client = client

    async def set_reward(
        self, reward: Number | None = None, *, idempotency_key: str | None = None, **options: Unpack[RewardOptions]
    ) -> None:
        """Set one or several rewards (see RewardOptions), by default the reward of the main agent's last complete turn.

        Setting a reward again replaces it. Raises NotFound for an unknown turn, and InvalidRequest for a reward that is
        not finite or a wrong number of scores.
        """
        await self._client.run(operations.set_reward(self, reward, options, idempotency_key))

    async def mark(
        self,
        interaction_id: str | None = None,
        *,
        turn: int | None = None,
        trainable: bool,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Set whether a turn is trained; with `spans`, only these ranges [start, end) of its output tokens.

        `interaction_id` or `turn` selects the turn. `turn`: its index in order of completion, from 0. Raises NotFound
        for an unknown turn, and InvalidRequest for a range outside the output or an output without logprobs.
        """
        await self._client.run(operations.mark(self, interaction_id, turn, trainable, spans))

    async def generate(self, prompt_ids: Sequence[int], **options: Unpack[GenerateOptions]) -> Generated:
        """Sample from token ids as a turn of this session.

        Raises InvalidRequest for a refused parameter, and ContextLengthExceeded for too many ids.
        """
        return await self._client.run(operations.generate(self, prompt_ids, options))

    async def tokenize(self, messages: Sequence[Json] | str, **options: Json) -> list[int]:
        """Return the prompt ids that a conversation would have as the next turn, or the ids of a text.

        Nothing is recorded. `options`: other fields of `POST /v1/tokenize`, such as `tools`, `chat_template_kwargs`,
        and `continue_from` with the exact ids of the first messages. Raises InvalidRequest for a conversation that the
        chat template cannot express.
        """
        return await self._client.run(operations.tokenize(self, messages, options))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids, without special tokens if `skip_special_tokens`."""
        return await self._client.run(operations.detokenize(self, token_ids, skip_special_tokens))

    async def end_token_ids(self) -> list[int]:
        """Return the token ids that end the answers of the model, or of the first policy of several models."""
        return await self._client.run(operations.end_token_ids(self))

    async def parse(self, token_ids: Sequence[int], **options: Unpack[ParseOptions]) -> dict[str, Json]:
        """Parse sampled ids to an assistant message, as in a chat completion; nothing is recorded.

        The server's output parser finds its `tool_calls` and `reasoning_content`. Raises InvalidRequest for an unknown
        parser.
        """
        return await self._client.run(operations.parse(self, token_ids, options))

    async def rotate_keys(self, keys: Sequence[KeyKind] | None = None, *, key_lifetime_s: float | None = None) -> None:
        """Replace keys: any of `agent`, `control` and `path` (the secret in the addresses); by default all.

        `feedback` is a key that sets rewards of turns by `interaction_id` and does nothing else. A session has one from
        the first call that names it on.

        The old keys become invalid at once, and the attributes of this session are set to the new keys. They expire
        after `key_lifetime_s` seconds (1 s to ten years; default: the server's).
        """
        await self._client.run(operations.rotate_keys(self, keys, key_lifetime_s))

    async def end(
        self, *, idempotency_key: str | None = None, retry_s: float | None = None, **options: Unpack[EndOptions]
    ) -> int:
        """End the session and return its number of interactions. Ending it again with the same fields is not an error.

        The call is retried for up to `retry_s` seconds, by default the client's own. Raises EndedOtherwise if the
        session has ended with other fields or rewards.
        """
        return await self._client.run(operations.end(self, options, idempotency_key), retry_s=retry_s)

    async def withdraw(
        self, *, idempotency_key: str | None = None, retry_s: float | None = None, **options: Unpack[WithdrawOptions]
    ) -> int:
        """Withdraw the session and return its number of interactions; a live session ends, with `options`.

        The session leaves its group. No claim includes it any more, nor does any export that does not name it. Its
        turns remain. Withdrawing it again has no effect. The call is retried for up to `retry_s` seconds, by default
        the client's own.
        """
        return await self._client.run(operations.withdraw(self, options, idempotency_key), retry_s=retry_s)


class AsyncClient(Connection):
    """Asyncio client of one server. Use it with `async with`, or call `aclose`.

    `url` is the server's address. Alternatively, `app` is an ASGI application in this process, such as
    `tokengrove.testing.build_app(...)`. It is called without sockets, and agents can reach it only through
    `http_client`. The block, or the first call, starts its lifespan on the running event loop,
    and raises the errors of its start. Clients of one application share it, and the last client that is closed or
    collected stops it for good. An application with the attribute `running_loop`, such as that of `build_app`, runs
    already: it is neither started nor stopped.

    `admin_key` is needed if the server has one. A call may take `timeout_s` seconds, in addition to its own `wait_s`.
    Every method raises a server's error as the same class of `tokengrove.errors` (Unauthorized or Forbidden without the
    right key), or ServerUnreachable if there is no answer.

    A call is retried for up to `retry_s` seconds (0: never) while the server does not answer, its database is
    unavailable (StoreUnavailable) or a limit is reached (TooManyRequests). Then the last error is raised. A retried
    call takes effect once. Turns (`generate`), `events`, `health` and `ready` are never retried. Calls that could
    change the engine or the mailbox twice are retried only if they certainly did not arrive.
    """

    def __init__(
        self,
        url: str | None = None,
        admin_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        *,
        app: ASGIApp | None = None,
        retry_s: float = RETRY_S,
    ) -> None:
        super().__init__(url, admin_key, timeout_s, app, retry_s)
        self._http = httpx.AsyncClient(
            limits=LIMITS,
            verify=trusted(httpx),
            transport=None if self.hold is None else AsyncTransport(self.hold),
        )
        # blocking: weakref.finalize(self, self._http.close)  # for `with Client(url).session(...)`

    async def __aenter__(self) -> AsyncClient:
        if self.hold is not None:
            await self.hold.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections. The last client of an application in this process waits until it has stopped."""
        await self._http.aclose()
        if self.hold is not None:
            await self.hold.aclose()

    @overload
    def http_client(self, library: Literal["httpx"] = "httpx", *, timeout_s: float = ...) -> httpx.AsyncClient: ...
    @overload
    def http_client(self, library: Literal["httpx2"], *, timeout_s: float = ...) -> httpx2.AsyncClient: ...
    def http_client(
        self, library: Library = "httpx", *, timeout_s: float = AGENT_TIMEOUT_S
    ) -> httpx.AsyncClient | httpx2.AsyncClient:
        """Return an HTTP client for agents (`http_client` of an SDK) that can reach `base_url` and `root_url`.

        It is the only way to reach an application in this process. `library`: the HTTP library of the SDK. openai
        supports both, anthropic needs httpx2 from version 1 on. The number of connections is unlimited, so all agents
        can share one client. The caller closes it. An agent waits `timeout_s` seconds for the next part of an answer,
        unless its SDK sets another timeout.
        """
        client: httpx.AsyncClient | httpx2.AsyncClient = async_http_client(self.hold, library, timeout_s)
        return client

    @asynccontextmanager
    async def session(self, task_id: str, **options: Unpack[SessionOptions]) -> AsyncIterator[AsyncSession]:
        """Start a session and end it with the block. After an exception, its outcome is Failed, with the reason."""
        session = await self.start_session(task_id, **options)
        try:
            yield session
        except BaseException as error:
            patience = None if isinstance(error, Exception) else min(self.retry_s, LEAVE_S)
            with suppress(ProxyError):  # the block's own exception matters more
                await self.run(operations.leave(session, error), retry_s=patience)
            raise
        await self.run(operations.leave(session, None))

    async def start_session(
        self,
        task_id: str,
        *,
        idempotency_key: str | None = None,
        retry_s: float | None = None,
        **options: Unpack[SessionOptions],
    ) -> AsyncSession:
        """Start a session that the caller ends. The same call with the same `idempotency_key` returns the same session.

        The call is retried for up to `retry_s` seconds, by default the client's own. Raises TooManyRequests if a limit
        of live sessions, capacity or staleness is reached, and InvalidRequest for a `session_id` that exists or an
        `api_key` in use.
        """
        steps = operations.start(task_id, options, idempotency_key)
        return AsyncSession(self, await self.run(steps, retry_s=retry_s))

    async def export(
        self,
        *,
        session_id: str | None = None,
        session_ids: Sequence[str] | None = None,
        filter: SessionFilter | None = None,
        **options: Unpack[ExportOptions],
    ) -> Export:
        """Return all samples of the named sessions, or of the sessions that `filter` selects; default layout `concat`.

        `Sample` describes the dtypes and shapes; `Export.sessions` lists missing parts. `format` is the transfer
        format: the samples are the same in every format. Formats arrow and parquet need pyarrow on both sides.
        `wait_s`: seconds to wait, at most 600, until the named sessions have ended. Raises SessionNotFound for an
        unknown id, and InvalidRequest for an option or filter that the server refuses.
        """
        return await self.run(operations.export(session_id, session_ids, filter, options))

    async def outline(
        self, session_id: str, *, filter: SessionFilter | None = None, **options: Unpack[ExportOptions]
    ) -> dict[str, Json]:
        """Return the contents of each sample of a session's export, as runs of tokens instead of arrays.

        It is meant for display: `samples` have `tokens` and `runs` ([start, end, kind, turn]) in addition to their
        labels, and the entry in `sessions` has `output_runs`. Raises the errors of `export`.
        """
        return await self.run(operations.outline(session_id, filter, options))

    async def claim(
        self,
        *,
        filter: SessionFilter | None = None,
        idempotency_key: str | None = None,
        **options: Unpack[ClaimOptions],
    ) -> Claim:
        """Lease ended, unleased sessions that `filter` selects; with `export`, also return their samples.

        The sessions are in the order in which they ended. If there are none, `claim_id` is None. The lease expires
        after `lease_s` seconds (default 600); then other consumers may claim the sessions. `wait_s`: seconds to wait
        for a first session, at most 600.
        """
        return await self.run(operations.claim(filter, options, idempotency_key))

    async def acknowledge(
        self, claim: Claim | str | None = None, session_ids: Sequence[str] | None = None, *, route: str | None = None
    ) -> Acknowledged:
        """Acknowledge a claim, or some of its sessions, so that they are never claimed again. Repeating it is harmless.

        `route`: the trained route that they were claimed for; None: that of the claim. Raises NotFound for a `claim_id`
        that holds no session.
        """
        return await self.run(operations.acknowledge(claim, session_ids, route))

    async def annotate(
        self,
        samples: Sequence[Sample],
        step: int,
        streams: Streams | None = None,
        scalars: Scalars | None = None,
        *,
        trainer: str = "trainer",
        align: Align = "tokens",
    ) -> int:
        """Tell the server what a trainer computed of samples in a step; return the number of turns with something new.

        `streams`: by name, one row of values per sample; of the trained tokens, the server stores them in float32, NaN
        as no value. The name `logprobs` is for the trainer's logprobs before its update, at the temperature of the
        turn, which the server compares with those that were sampled; `is_masked` and `is_clipped` are counted.
        `scalars`: by name, one number per sample. `align`: the rows have a value for each token of the sample
        (`tokens`), for each but the first (`next`: value t is that of token t + 1), from the first sampled token on
        (`response`), or for each trained token (`trained`). Rows of all but the last may be longer, as in padded
        batches. The adapters' `annotation` gives `samples`, `streams` and `align` for the batches of trainers.

        Samples without trained tokens are left out, with their scalars. Repeating a call is harmless. Raises
        AnnotatedOtherwise if another value was told of a token, step and name,
        NotFound for turns that do not exist, and InvalidRequest for rows that do not fit the samples.
        """
        return await self.run(operations.annotate(bodies(samples, step, trainer, streams or {}, scalars or {}, align)))

    async def webhook_deliveries(self, state: str = "dead", *, limit: int | None = None) -> list[dict[str, Json]]:
        """Return the newest events that receivers of webhooks did not take: `dead`, or `waiting` for a next attempt."""
        return await self.run(operations.webhook_deliveries(state, limit))

    async def resend_webhooks(self, ids: Sequence[str] | None = None) -> int:
        """Send dead letters again, those of the events `ids` or all, and return their number."""
        return await self.run(operations.resend_webhooks(ids))

    async def trainer_steps(
        self, trainer: str | None = None, *, before: int | None = None, limit: int | None = None
    ) -> list[dict[str, Json]]:
        """Return the newest steps that trainers told about, with sums: turns, tokens, `masked`, `clipped`, `kl`."""
        return await self.run(operations.trainer_steps(trainer, before, limit))

    async def trainer_step(self, trainer: str, step: int) -> list[dict[str, Json]]:
        """Return what a trainer told of each turn of a step, in sum. Raises NotFound for an unknown step."""
        return await self.run(operations.trainer_step(trainer, step))

    async def mismatch(
        self, trainer: str | None = None, *, first_step: int | None = None, last_step: int | None = None
    ) -> dict[str, Json]:
        """Return how far trainers' logprobs are from the sampled ones, by engine server, weight version and dtype.

        `named`: the samplers whose KL is above the limit, or far above that of the others.
        """
        return await self.run(operations.mismatch(trainer, first_step, last_step))

    async def annotations(self, session_id: str) -> list[dict[str, Json]]:
        """Return what trainers told of the turns of a session, in sum, by turn, trainer and step."""
        return await self.run(operations.session_annotations(session_id))

    async def sessions(
        self,
        filter: SessionFilter | ListingFilter | None = None,
        *,
        order: str | None = None,
        include: Sequence[ListingPart] = (),
    ) -> list[dict[str, Json]]:
        """Return the sessions that `filter` selects, oldest first, as `GET /rl/sessions` lists them.

        The pages are joined. Without a filter, all sessions are returned. `order`: `newest`, or a value, such as
        `reward` or `-metadata.step` (descending), which is refused if more than 10,000 sessions would be sorted.
        `include`: `summary` adds a summary to each session; `returns` also adds the returns of its turns. Raises
        InvalidRequest for an unknown filter or order.
        """
        return await self.run(operations.sessions(filter, order, include))

    async def runs(
        self,
        filter: SessionFilter | ListingFilter | None = None,
        *,
        run: str | None = None,
        step: str | None = None,
    ) -> list[dict[str, Json]]:
        """Return figures of the sessions that `filter` selects, by training run and step.

        `run`, `step`: the keys of the sessions' metadata that name them (default `experiment` and `step`). Of each:
        `sessions`, `rewarded`, `mean_score`, `std_score`, `mean_turns`, `mean_output_tokens`, `forks`, `failed`, `kl`
        and `largest_ratio` of what trainers told, and `worst`, the ten sessions with the lowest scores. Validation
        sessions and withdrawn ones do not count.
        """
        return await self.run(operations.runs(filter, run, step))

    async def session_page(
        self,
        filter: SessionFilter | ListingFilter | None = None,
        *,
        order: str | None = None,
        include: Sequence[ListingPart] = (),
        limit: int | None = None,
        cursor: str | None = None,
        partial: bool = False,
    ) -> dict[str, Json]:
        """Return one page of sessions: `sessions`, the `cursor` of the next page (None on the last page), and `counts`.

        A page has at most `limit` sessions (default 1000) and may have fewer. `counts` is there if `include` names it,
        `sorted` with an `order` by a value. `partial`: if too many sessions would be sorted, sort the newest ones.
        """
        return await self.run(operations.session_page(filter, order, include, limit, cursor, partial))

    async def groups(
        self,
        filter: SessionFilter | ListingFilter | None = None,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> dict[str, Json]:
        """Return one page of groups, newest first, with the scores of the sessions that `filter` selects.

        The page has `groups`, at most `limit` (default 50), and the `cursor` of the next page (None on the last page).
        """
        return await self.run(operations.groups(filter, limit, cursor))

    async def session_tree(self, session_id: str, include: Sequence[str] = ()) -> SessionTree:
        """Return one session with all its interactions. Raises SessionNotFound.

        `include` adds parts to each interaction: `added`, `logprobs`, `reply`, `times`, `compared`.
        """
        return await self.run(operations.session_tree(session_id, include))

    async def delete_session(self, session_id: str) -> int:
        """Delete a session, live or ended, for good, and return its number of turns. Running turns are cancelled.

        Raises SessionNotFound.
        """
        return await self.run(operations.delete_session(session_id))

    async def withdraw_session(self, session_id: str, **options: Unpack[WithdrawOptions]) -> int:
        """Withdraw a session by its id, like the session's own `withdraw`. Raises SessionNotFound."""
        return await self.run(operations.withdraw_session(session_id, options))

    async def show_turn(
        self,
        session_id: str,
        turn: int | str,
        include: Sequence[str] = (),
        *,
        start: int | None = None,
        limit: int | None = None,
        **export: Unpack[TokenOptions],
    ) -> dict[str, Json]:
        """Return one turn, by its number or by the id of its interaction, as the server sends it.

        `include` adds parts: `messages`, `added`, `ids`, `logprobs`, `request`, `reply`, `times`, `compared`,
        `tokens`, `replay` and `columns`. `export`: the options of the export that `tokens` describes. `start` and
        `limit`: the tokens of `columns`. Raises NotFound, or InvalidRequest for an unknown part.
        """
        return await self.run(operations.show_turn(session_id, turn, include, (start, limit), export))

    async def image(self, session_id: str, digest: str) -> bytes:
        """Return an image of a session as its client sent it, by its `digest` in messages and exports.

        Raises SessionNotFound, and NotFound for a digest that the session does not have.
        """
        return await self.run(operations.image(session_id, digest))

    async def reasons(self) -> dict[str, dict[str, str]]:
        """Return the meanings of the reasons in answers: by field, then by reason."""
        return await self.run(operations.reasons())

    async def events(self, kinds: Collection[EventKind] | None = None) -> AsyncGenerator[ServerEvent]:
        """Yield the events of `GET /rl/events`: `statistics` at once and every two seconds, and changed `sessions`.

        It connects when the first event is requested, so earlier changes are missing. `kinds`: yield only these. The
        iterator ends when the server closes the stream, for example because it stops. It raises ServerUnreachable if
        the connection breaks. After either, call it again and reload the sessions that you follow. Closing the iterator
        disconnects.
        """
        reader = EventReader()
        async with self._open(operations.events_call(kinds)) as response:
            async for piece in response.aiter_bytes():
                for event in reader.feed(piece):
                    yield event

    async def health(self) -> dict[str, Json]:
        """Return the answer of `GET /health`."""
        return await self.run(operations.health())

    async def ready(self) -> dict[str, Json]:
        """Return the answer of `GET /ready`. Raises StoreUnavailable, or EngineUnavailable if no engine answers."""
        return await self.run(operations.ready())

    async def statistics(self, *, history_s: float | None = None) -> dict[str, Json]:
        """Return the statistics of `GET /rl/statistics`: over all workers, since the server's start and recent.

        `history_s`: seconds that `history` covers; by default the last hour.
        """
        return await self.run(operations.statistics(history_s))

    async def metrics(self) -> str:
        """Return the server's metrics as Prometheus text."""
        return await self.run(operations.metrics())

    async def generate(self, prompt_ids: Sequence[int], **options: Unpack[GenerateOptions]) -> Generated:
        """Sample from token ids outside any session; nothing is recorded.

        Raises InvalidRequest for a refused parameter, and ContextLengthExceeded for too many ids.
        """
        return await self.run(operations.generate(None, prompt_ids, options))

    async def tokenize(self, messages: Sequence[Json] | str, **options: Json) -> list[int]:
        """Return the prompt ids that a conversation would have, or the ids of a text.

        Nothing is recorded. `options`: other fields of `POST /v1/tokenize`, such as `tools`, `chat_template_kwargs`,
        and `continue_from` with the exact ids of the first messages. Raises InvalidRequest for a conversation that the
        chat template cannot express.
        """
        return await self.run(operations.tokenize(None, messages, options))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids, without special tokens if `skip_special_tokens`."""
        return await self.run(operations.detokenize(None, token_ids, skip_special_tokens))

    async def end_token_ids(self) -> list[int]:
        """Return the token ids that end the answers of the model, or of the first policy of several models."""
        return await self.run(operations.end_token_ids(None))

    async def parse(self, token_ids: Sequence[int], **options: Unpack[ParseOptions]) -> dict[str, Json]:
        """Parse sampled ids to an assistant message, as in a chat completion; nothing is recorded.

        The server's output parser finds its `tool_calls` and `reasoning_content`. Raises InvalidRequest for an unknown
        parser.
        """
        return await self.run(operations.parse(None, token_ids, options))

    async def logprobs(
        self,
        token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        interaction_ids: Sequence[str] | None = None,
        session_id: str | None = None,
        start: int | None = None,
        model: str | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
    ) -> list[TokenScores]:
        """Return logprobs of given tokens under a model: current policy, older adapter, frozen reference or teacher.

        Give one of: `token_ids`, one sequence or a list of sequences, scored from position `start` (default 1) on;
        `interaction_ids`, turns whose output is scored; `session_id`, for all turns of a session. `model`: a name that
        the server declares, `policy@7` for an adapter version (default: the server's own engine). `temperature`
        (default 1). `top_k`: the number of alternatives of each token (default 0, at most 20). Nothing is recorded.

        Raises InvalidRequest for tokens of another tokenizer, NotFound for unknown turns, EngineIncapable if the engine
        scores no tokens, and UnsupportedParameter for a temperature at which it cannot.
        """
        chosen = {"input_ids": token_ids, "interaction_ids": interaction_ids, "session_id": session_id, "start": start}
        under = {"model": model, "temperature": temperature, "top_k": top_k}
        return await self.run(operations.logprobs({**chosen, **under}))

    async def grant_capacity(self, n: int = 1, *, idempotency_key: str | None = None) -> int:
        """Allow `n` more sessions to start, or fewer if `n` is negative; return the number that may start now."""
        return await self.run(operations.grant_capacity(n, idempotency_key))

    async def engine(self, *, model: str | None = None) -> EngineState:
        """Return the state of the engine: weight version, pause, and requests in flight and waiting.

        `model`, here and below: the route whose engine it is, if the server declares several models.
        """
        return await self.run(operations.engine(model))

    async def pause(self, mode: PauseMode = "abort", *, model: str | None = None) -> EngineState:
        """Pause generation until `resume`; new requests wait.

        `mode` selects what happens to requests in flight; none is lost: `abort` (interrupt and later resume them),
        `drain` (wait for them to finish), `retract` or `in_place` (the engine keeps them).
        """
        return await self.run(operations.engine_step("pause_generation", {"mode": mode}, model))

    async def resume(self, *, model: str | None = None) -> EngineState:
        """End a pause; interrupted requests continue."""
        return await self.run(operations.engine_step("continue_generation", {}, model))

    async def update_weights(
        self, path: str, *, version: int | None = None, mode: PauseMode = "abort", model: str | None = None
    ) -> int:
        """Load the weights in `path`, a folder that the engine can read, and return their version (default: one more).

        `mode` selects what happens to requests in flight, as in `pause`; with `in_place`, the engine changes the
        weights while they run. Raises EngineFailed if the engine cannot load the weights, and EngineIncapable if it has
        none.
        """
        return await self.run(operations.update_weights(path, version, mode, model))

    async def transfer_weights(self, step: TransferStep, *, model: str | None = None, **fields: Json) -> EngineState:
        """Run one step of SGLang's or vLLM's weight transfers, with its fields; `version` is the new weight version.

        Raises EngineIncapable for an engine without this step.
        """
        return await self.run(operations.engine_step(step, fields, model))

    async def release_memory(
        self,
        tags: Sequence[MemoryTag] | None = None,
        *,
        mode: Literal["abort", "drain"] = "abort",
        model: str | None = None,
    ) -> EngineState:
        """Free the engine's memory until it is resumed: any of `weights`, `kv_cache` and `cuda_graph`; by default all.

        The engine is paused meanwhile; `mode` as in `pause`. Raises EngineIncapable for an engine that cannot release
        memory, such as SGLang without its memory saver.
        """
        return await self.run(operations.engine_step("release_memory", {"tags": tags, "mode": mode}, model))

    async def resume_memory(self, tags: Sequence[MemoryTag] | None = None, *, model: str | None = None) -> EngineState:
        """Resume released memory. Once all of it is resumed, generation continues."""
        return await self.run(operations.engine_step("resume_memory", {"tags": tags}, model))

    async def flush_cache(self, *, model: str | None = None) -> EngineState:
        """Empty the engine's prefix cache."""
        return await self.run(operations.engine_step("flush_cache", {}, model))

    async def models(self) -> list[dict[str, Json]]:
        """Return the models that the server declares, in the order of its table; none without a table."""
        return await self.run(operations.models())

    async def add_model(self, name: str, **options: Json) -> list[dict[str, Json]]:
        """Serve a frozen or external model until it is removed or the server ends; return all models.

        `options`: those of a table of models. Raises InvalidRequest, which names the option.
        """
        return await self.run(operations.add_model(name, options))

    async def remove_model(self, name: str) -> list[dict[str, Json]]:
        """Serve a frozen or external model no more; return the others. Raises InvalidRequest while its turns run."""
        return await self.run(operations.remove_model(name))

    async def publish_adapter(
        self,
        path: str | None = None,
        *,
        config: Mapping[str, Json] | None = None,
        tensors: bytes | None = None,
        version: int | None = None,
        name: str | None = None,
    ) -> int:
        """Load a LoRA adapter and make it the newest version; return the version (default: one more than before).

        `path`: a folder in PEFT's layout that the engine can read. Alternatively, `config` (the object in
        adapter_config.json) and `tensors` (the bytes of adapter_model.safetensors). `name`: the model, if the server
        has several policies. Waits while `--max-live-versions` are in use. Raises InvalidRequest for a version that is
        not larger than before or an adapter that does not fit the model, and EngineIncapable if the engine has none.
        """
        return await self.run(operations.publish_adapter(path, config, tensors, version, name))

    async def adapters(self) -> list[dict[str, Json]]:
        """Return the adapters of each policy: its `name`, the `newest` version, the `live` ones, and `waiting_for`."""
        return await self.run(operations.adapters())

    async def withdraw_adapter(self, version: int, *, name: str | None = None) -> dict[str, Json]:
        """Unload an adapter that is neither in use nor the newest; return the adapters of its policy.

        Raises NotFound if it is not live, and InvalidRequest if it may not be unloaded.
        """
        return await self.run(operations.withdraw_adapter(version, name))

    async def servers(self) -> list[EngineServer]:
        """Return the engine servers of the pool. Raises EngineIncapable if the engine is not a pool of servers."""
        return await self.run(operations.servers())

    async def add_server(self, url: str) -> list[EngineServer]:
        """Add the engine server at `url` while requests run; return the pool.

        Raises InvalidRequest if the server is already in the pool or cannot join it.
        """
        return await self.run(operations.change_servers("POST", url))

    async def remove_server(self, url: str) -> list[EngineServer]:
        """Remove the engine server at `url` once its running requests are finished; return the pool."""
        return await self.run(operations.change_servers("DELETE", url))

    async def next_request(self, session_id: str | None = None, *, wait_s: float = 0.0) -> dict[str, Json]:
        """Return the oldest request in the mailbox, of one session or of all, as the answer of `/mailbox/next`.

        `status` is `request`, `empty` if there was none within `wait_s` seconds (at most 600), or `ended` if the
        session accepts no more turns. Raises EngineIncapable if the engine is not a mailbox.
        """
        return await self.run(operations.next_request(session_id, wait_s))

    async def deliver(self, **answer: Unpack[Delivery]) -> str:
        """Answer a request of the mailbox; return the id of its interaction.

        Raises NotFound if the request no longer waits, and InvalidRequest if it has an answer or the answer does not
        fit.
        """
        return await self.run(operations.deliver(answer))

    async def run(self, steps: Steps[T], *, retry_s: float | None = None) -> T:
        """Send the calls of an operation of `tokengrove.client.operations` and return its result.

        Each call is retried for up to `retry_s` seconds, by default the client's own.
        """
        try:
            call = next(steps)
            while True:
                call = steps.send(await self._repeated(self.attempts(call, retry_s)))
        except StopIteration as end:
            result: T = end.value
            return result

    async def _repeated(self, attempts: Attempts) -> Json:
        while True:
            try:
                return await self._send(attempts.call)
            except ProxyError as error:
                pause_s = attempts.pause_s(error)
            await self.clock.wait(pause_s)

    async def _send(self, call: operations.Call) -> Json:
        try:
            response = await self._http.request(**self.arguments(call))
        except httpx.TransportError as error:
            raise self.unreachable(error) from error
        return decode(response, call.raw)

    @asynccontextmanager
    async def _open(self, call: operations.Call) -> AsyncIterator[httpx.Response]:
        """Send a call whose answer is streamed. Raises the server's error, or ServerUnreachable."""
        try:
            async with self._http.stream(**self.arguments(call)) as response:
                if not response.is_success:
                    await response.aread()
                    decode(response)
                yield response
        except httpx.TransportError as error:
            raise self.unreachable(error) from error
