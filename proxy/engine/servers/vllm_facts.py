"""What a vLLM server can do: read from its description at start, and its `--logprobs-mode` and columns by sampling.

A flag that is missing at the server is named, with what it costs. A side column counts as recorded only if a streamed
reply had it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import orjson

from proxy.engine.interface import Capability
from proxy.engine.servers.connection import EventStream, ServerConnection
from proxy.engine.servers.vllm_columns import MASK, ROUTED
from proxy.engine.servers.vllm_wire import COMPLETIONS, GENERATE, tokens_of
from tokengrove.errors import EngineFailed, EngineLost, EngineUnavailable, InvalidRequest, ProxyError
from tokengrove.options.start import Replay

_DEFAULT_CONTEXT = 32_768
_PROBE_S = 20.0
_PULL = 100.0
"""The bias that makes a token certain."""

_CERTAIN = -0.5
"""A logprob above this cannot be the model's own for both of two tokens."""

_PULLED = (1, 2)
_ALTERNATIVES = 5
_ROUNDING = 1e-3
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_HEAD = "lm_head"
_READABLE = ("/is_paused", "/weight_info", "/server_info")

_FIELDS = {MASK: Replay.KEPT, ROUTED: Replay.EXPERTS}
_STREAMED_SINCE = {Replay.KEPT: (0, 32), Replay.EXPERTS: (0, 24)}
"""The first version whose streamed replies have a column. Replies that are not streamed have masks since 0.28, and
experts since 0.22."""

_FLAGS = {
    Replay.KEPT: "--return-sampling-mask --logprobs-mode processed_logprobs (vLLM 0.32 or later), with which vLLM "
    "takes only requests with top_k and a temperature above 0",
    Replay.EXPERTS: "--enable-return-routed-experts (vLLM 0.24 or later, and a mixture-of-experts model)",
}
_NO_COLUMNS: frozenset[Replay] = frozenset()

_ALWAYS = frozenset(
    {
        *(Capability.TOP_LOGPROBS, Capability.SEED, Capability.STREAMING),
        *(Capability.PENALTIES, Capability.LOGIT_BIAS, Capability.MIN_TOKENS),
    }
)


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """Facts about a server. `model_path`: the folder or the name on the hub of its model. `paths`: the paths of its
    endpoints; empty if it does not describe them.

    `config`: its configuration, which only servers with VLLM_SERVER_DEV_MODE=1 tell. `generates`: it has GENERATE.
    `processed`: its `--logprobs-mode` is `processed_logprobs`, else `raw_logprobs`. `returned`: the side columns that
    its replies have. `records`: those that its streamed replies have.
    """

    version: str = ""
    model: str = ""
    model_path: str = ""
    context_length: int = _DEFAULT_CONTEXT
    paths: frozenset[str] = frozenset()
    config: Mapping[str, Any] = field(default_factory=dict)
    generates: bool = False
    processed: bool = False
    returned: frozenset[Replay] = _NO_COLUMNS
    records: frozenset[Replay] = _NO_COLUMNS

    @property
    def controls(self) -> bool:
        """True if the server has the endpoints for pauses and weights."""
        return "/is_paused" in self.paths

    @property
    def names_weights(self) -> bool:
        """True if the server has named weight versions."""
        return "/weight_info" in self.paths

    @property
    def sleeps(self) -> bool:
        """True if the server can release its memory. A server that does not say so is asked when the time comes."""
        return bool(self._of("model_config").get("enable_sleep_mode")) if self.config else "/sleep" in self.paths

    @property
    def configured_mode(self) -> str:
        """The `--logprobs-mode` in the configuration; "" if the server does not tell it."""
        return str(self._of("model_config").get("logprobs_mode") or "")

    @property
    def dtype(self) -> str:
        """The dtype of the weights in the configuration; "" if the server does not tell it."""
        return str(self._of("model_config").get("dtype") or "").removeprefix("torch.")

    @property
    def quantization(self) -> str:
        """The quantisation of the weights in the configuration; "" without one, or if the server does not tell it."""
        return str(self._of("model_config").get("quantization") or "")

    @property
    def configured_columns(self) -> frozenset[Replay]:
        """The side columns that are switched on in the configuration; empty if the server does not tell it."""
        model = self._of("model_config")
        found = {Replay.KEPT} if model.get("return_sampling_mask") else set()
        if {**model, **self._of("aux_output_config")}.get("enable_return_routed_experts"):
            found.add(Replay.EXPERTS)
        return frozenset(found)

    @property
    def unrecorded(self) -> dict[Replay, str]:
        """Why a streamed reply lacks side columns, with the way out."""
        return {each: self._why_unrecorded(each) for each in _FIELDS.values() if each not in self.records}

    def _why_unrecorded(self, column: Replay) -> str:
        since = ".".join(map(str, _STREAMED_SINCE[column]))
        if column in self.returned:
            return f"vLLM {self.version} does not stream them; use vLLM {since} or later"
        flags = _FLAGS[column]
        return "start it with " + (flags if self.generates else f"--enable-scale-out {flags}")

    @property
    def dense(self) -> bool:
        """True if the server reports that its model has no experts."""
        return self._of("parallel_config").get("is_moe_model") is False

    @property
    def world_size(self) -> int:
        """The number of the server's processes that have weights, with those of data parallelism."""
        parallel = self._of("parallel_config")
        return int(parallel.get("world_size_across_dp") or parallel.get("world_size") or 1)

    @property
    def max_running_requests(self) -> int | None:
        """The number of requests that the server runs at once; None if unknown."""
        told = self._of("scheduler_config").get("max_num_seqs")
        return told if isinstance(told, int) else None

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities of the server, except images."""
        found = set(_ALWAYS)
        if self.generates:
            found.add(Capability.GRAMMAR)
        if self.controls:
            found.add(Capability.UPDATE_WEIGHTS)
        if self.sleeps:
            found.add(Capability.RELEASE_MEMORY)
        if (self.config.get("vllm_env") or {}).get("VLLM_BATCH_INVARIANT"):
            found.add(Capability.DETERMINISTIC)
        if not self.without_lora:
            found.add(Capability.ADAPTERS)
        if not self.adapts_heads:
            found.add(Capability.PROMPT_LOGPROBS)
        return frozenset(found)

    @property
    def adapts_heads(self) -> bool:
        """True if the server has LoRA for the output layer, or does not tell.

        vLLM then computes the logprobs of a prompt with the adapters of whichever requests sample a token at that time
        (https://github.com/vllm-project/vllm/issues/51594), and on a CPU it ends if these are several.
        """
        if not self.config:
            return LOAD_ADAPTER in self.paths
        lora = self._of("lora_config")
        return bool(lora) and any(name.endswith(_HEAD) for name in lora.get("target_modules") or [_HEAD])

    @property
    def without_lora(self) -> str:
        """What the server lacks to load LoRA adapters; "" if nothing is known to be missing."""
        flags = "--enable-lora --max-loras N --max-lora-rank RANK"
        if LOAD_ADAPTER not in self.paths:
            return f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment and {flags}"
        return flags if self.config and not self._of("lora_config") else ""

    @property
    def missing(self) -> list[str]:
        """For each flag that the server lacks, the flag and what it costs, as one sentence."""
        told = []
        if not self.generates:
            told.append(
                "without --enable-scale-out (vLLM 0.32; older versions may lack it) it serves no forced tools, no JSON "
                "schemas and no images, and it does not tell which weights sampled a token"
            )
        if not self.controls:
            told.append(
                "without VLLM_SERVER_DEV_MODE=1 it cannot be paused with its requests, and its weights and its prefix "
                "cache cannot be changed"
            )
        if not self.processed:
            told.append(
                "without --logprobs-mode processed_logprobs its logprobs are of temperature 1, before penalties and "
                "bias (logprobs_of: model)"
            )
        if self.adapts_heads:
            told.append(
                f"without --lora-target-modules that leave out {_HEAD}, next to --enable-lora, it gives no logprobs of "
                "given tokens (VLLM_SERVER_DEV_MODE=1 makes it tell them)"
            )
        return told

    def _of(self, section: str) -> Mapping[str, Any]:
        config = self.config.get("vllm_config")
        found = config.get(section) if isinstance(config, Mapping) else None
        return found if isinstance(found, Mapping) else {}


async def read_facts(connection: ServerConnection) -> VllmFacts:
    """Read the facts about a server. Raises EngineLost, or EngineUnavailable if it is not vLLM or returns logits."""
    version = await connection.probe("/version")
    if version is None:
        raise EngineUnavailable(f"{connection.url} is not a vLLM server: it has no /version")
    models = (await connection.probe("/v1/models") or {}).get("data")
    if not models:
        raise EngineUnavailable(f"{connection.url} serves no model")
    paths = await _paths(connection)
    config = await connection.probe("/server_info?config_format=json") if "/server_info" in paths else None
    facts = VllmFacts(
        version=str(version.get("version", "")),
        model=models[0]["id"],
        model_path=str(models[0].get("root") or ""),
        context_length=int(models[0].get("max_model_len") or _DEFAULT_CONTEXT),
        paths=paths,
        config=config or {},
        generates=GENERATE in paths,
    )
    if await rests(connection, facts):  # it would hold a request
        returned = facts.configured_columns
        records = frozenset(each for each in returned if _version(facts.version) >= _STREAMED_SINCE[each])
        processed = facts.configured_mode == "processed_logprobs"
        return replace(facts, processed=processed, returned=returned, records=records)
    try:
        processed, returned = await _probed(connection, facts.model, GENERATE)
    except EngineLost:  # it is late, and may have the endpoint
        raise
    except (EngineUnavailable, InvalidRequest):  # it lacks the endpoint, or has it switched off
        processed, _ = await _probed(connection, facts.model, COMPLETIONS)
        return replace(facts, generates=False, processed=processed)
    records = await _streamed(connection, facts.model) if returned else _NO_COLUMNS
    return replace(facts, generates=True, processed=processed, returned=returned, records=records)


def _version(text: str) -> tuple[int, ...]:
    """The first two numbers of a version, as far as there are any."""
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())


async def rests(connection: ServerConnection, facts: VllmFacts) -> bool:
    """True if the server reports that it is paused. Raises EngineLost."""
    told = await connection.probe("/is_paused") if "/is_paused" in facts.paths else None
    return told is not None and told.get("is_paused") is True


async def _paths(connection: ServerConnection) -> frozenset[str]:
    """The paths of the server's endpoints. A server that does not list them is asked for those that can be read."""
    described = await connection.probe("/openapi.json")
    if described is not None and isinstance(described.get("paths"), Mapping):
        return frozenset(described["paths"])
    return frozenset([path for path in _READABLE if await connection.probe(path) is not None])


class _Pulled(NamedTuple):
    """A sampled token that a bias made certain: its logprob, the total probability of the likeliest tokens, and the
    side columns of the reply."""

    logprob: float
    total: float
    columns: frozenset[Replay]


async def _probed(connection: ServerConnection, model: str, path: str) -> tuple[bool, frozenset[Replay]]:
    """Whether logprobs are taken after the logit bias, and the side columns of a reply that is not streamed.

    A bias makes a token certain. Its own logprob without the bias can be close to 0 for one of two tokens at most.
    Raises EngineUnavailable for logits.
    """
    columns = _NO_COLUMNS
    for token in _PULLED:
        pulled = await _pulled(connection, model, path, token)
        columns |= pulled.columns
        if pulled.logprob > _ROUNDING or pulled.total > 1.0 + _ROUNDING:
            raise EngineFailed(
                f"{connection.url} returns logits instead of logprobs; start it with --logprobs-mode processed_logprobs"
            )
        if pulled.logprob < _CERTAIN:
            return False, columns
    return True, columns


async def _pulled(connection: ServerConnection, model: str, path: str, token: int) -> _Pulled:
    if path == GENERATE:
        body = _probe_body(model, token)
    else:
        names = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        body = {"model": model, "prompt": [0], **_probe_params(token), **names}
    answer = await connection.call(path, body, limit_s=_PROBE_S)
    choice = answer["choices"][0]
    ids, logprobs, alternatives = tokens_of(choice, _ALTERNATIVES)
    if list(ids) != [token]:
        raise EngineUnavailable(f"{connection.url} does not apply logit_bias, so its logprobs cannot be told apart")
    total = sum(math.exp(min(value, _PULL)) for _, value in next(iter(alternatives)))
    return _Pulled(logprobs[0], total, _columns_in(choice))


async def _streamed(connection: ServerConnection, model: str) -> frozenset[Replay]:
    """The side columns of a streamed reply. Raises EngineLost."""
    found = _NO_COLUMNS

    def read(events: list[Any]) -> bool:
        nonlocal found
        for event in events:
            for choice in event.get("choices") or ():
                found |= _columns_in(choice)
        return False

    body = {**_probe_body(model, _PULLED[0]), "stream": True}
    try:
        async with asyncio.timeout(_PROBE_S):
            await connection.stream(GENERATE, [orjson.dumps(body)], {}, EventStream(read))
    except TimeoutError:
        raise EngineLost(f"{connection.url} does not answer within {_PROBE_S:g} s") from None
    except EngineLost:
        raise
    except ProxyError:  # it does not stream
        return _NO_COLUMNS
    return found


def _probe_body(model: str, token: int) -> dict[str, Any]:
    """A request to GENERATE for one token, which a bias makes certain."""
    return {"model": model, "token_ids": [0], "sampling_params": {**_probe_params(token), "detokenize": False}}


def _probe_params(token: int) -> dict[str, Any]:
    """The sampling parameters. With `--return-sampling-mask`, vLLM refuses requests without `top_k`."""
    params = {"max_tokens": 1, "temperature": 1.0, "logit_bias": {str(token): _PULL}, "ignore_eos": True}
    return {**params, "logprobs": _ALTERNATIVES, "top_k": _ALTERNATIVES}


def _columns_in(choice: Mapping[str, Any]) -> frozenset[Replay]:
    return frozenset(column for name, column in _FIELDS.items() if choice.get(name) is not None)
