"""What a vLLM server can do: read from its description at start, and its `--logprobs-mode` by sampling.

A flag that is missing at the server is named, with what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from proxy.engine.interface import Capability
from proxy.engine.servers.connection import ServerConnection
from proxy.engine.servers.vllm_wire import COMPLETIONS, GENERATE, tokens_of
from tokengrove.errors import EngineFailed, EngineLost, EngineUnavailable, InvalidRequest

_DEFAULT_CONTEXT = 32_768
_PROBE_S = 20.0
_PULL = 100.0
"""The bias that makes a token certain."""

_CERTAIN = -0.5
"""A logprob above this cannot be the model's own for both of two tokens."""

_PULLED = (1, 2)
_ALTERNATIVES = 5
_ROUNDING = 1e-3
_READABLE = ("/is_paused", "/weight_info", "/server_info")

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
    `processed`: its `--logprobs-mode` is `processed_logprobs`, else `raw_logprobs`.
    """

    version: str = ""
    model: str = ""
    model_path: str = ""
    context_length: int = _DEFAULT_CONTEXT
    paths: frozenset[str] = frozenset()
    config: Mapping[str, Any] = field(default_factory=dict)
    generates: bool = False
    processed: bool = False

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
        return frozenset(found)

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
        return replace(facts, processed=facts.configured_mode == "processed_logprobs")
    try:
        return replace(facts, generates=True, processed=await _processes(connection, facts.model, GENERATE))
    except EngineLost:  # it is late, and may have the endpoint
        raise
    except (EngineUnavailable, InvalidRequest):  # it lacks the endpoint, or has it switched off
        processed = await _processes(connection, facts.model, COMPLETIONS)
        return replace(facts, generates=False, processed=processed)


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


async def _processes(connection: ServerConnection, model: str, path: str) -> bool:
    """True if logprobs are taken after the logit bias, False if before. Raises EngineUnavailable for logits.

    A bias makes a token certain. Its own logprob without the bias can be close to 0 for one of two tokens at most.
    """
    for token in _PULLED:
        logprob, total = await _pulled(connection, model, path, token)
        if logprob > _ROUNDING or total > 1.0 + _ROUNDING:
            raise EngineFailed(
                f"{connection.url} returns logits instead of logprobs; start it with --logprobs-mode processed_logprobs"
            )
        if logprob < _CERTAIN:
            return False
    return True


async def _pulled(connection: ServerConnection, model: str, path: str, token: int) -> tuple[float, float]:
    """The logprob of a token that a bias makes certain, and the total probability of the likeliest tokens."""
    params = {"max_tokens": 1, "temperature": 1.0, "logit_bias": {str(token): _PULL}, "ignore_eos": True}
    params["logprobs"] = _ALTERNATIVES
    body: dict[str, Any]
    if path == GENERATE:
        body = {"model": model, "token_ids": [0], "sampling_params": {**params, "detokenize": False}}
    else:
        names = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        body = {"model": model, "prompt": [0], **params, **names}
    answer = await connection.call(path, body, limit_s=_PROBE_S)
    ids, logprobs, alternatives = tokens_of(answer["choices"][0], _ALTERNATIVES)
    if list(ids) != [token]:
        raise EngineUnavailable(f"{connection.url} does not apply logit_bias, so its logprobs cannot be told apart")
    return logprobs[0], sum(math.exp(min(value, _PULL)) for _, value in next(iter(alternatives)))
