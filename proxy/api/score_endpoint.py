"""`POST /v1/logprobs`: logprobs of given tokens, or of recorded turns, under any model that an engine serves.

Scores make no turn, and are in no export.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request

from proxy.api.bodies import Bodies
from proxy.api.headers import headers_of
from proxy.api.http import JsonResponse, key_of
from proxy.api.known_fields import check_given
from proxy.api.prompt_scores import score_all, scored_output
from proxy.images.image_pool import ImagePool
from proxy.protocols.fields import (
    expect_list,
    expect_text,
    optional_float,
    optional_int,
    optional_text,
    parse_token_ids,
)
from proxy.sessions.access import Access
from proxy.store.recordings import Recordings
from proxy.trajectory.tree import Branch, build_tree
from proxy.turns.route import EngineRoute
from proxy.turns.scores import Scored, Scores, check_scores, check_tokens
from proxy.turns.turns import Turns
from proxy.types import Ids, Interaction
from tokengrove.errors import InvalidRequest, NotFound, brief

_TOKENS = ("input_ids", "interaction_ids", "session_id")
_FIELDS = (*_TOKENS, "start", "model", "temperature", "top_k")
_MOST_PROMPTS = 256
_MOST_ALTERNATIVES = 20


@dataclass(frozen=True, slots=True)
class _Asked:
    """A parsed body. One of the first three is given. `start`: the first position to score in each of `prompts`."""

    prompts: tuple[Ids, ...]
    interaction_ids: tuple[str, ...]
    session_id: str | None
    start: int
    model: str
    temperature: float
    top_k: int


class _Prompt(NamedTuple):
    """Tokens to score; `turn`: the recorded turn whose output they are."""

    scored: Scored
    turn: Interaction | None = None


class ScoreEndpoint:
    """The endpoint."""

    def __init__(self, access: Access, turns: Turns, recordings: Recordings, images: ImagePool, bodies: Bodies) -> None:
        self._access, self._bodies, self._images = access, bodies, images
        self._turns, self._routes, self._recordings = turns, turns.routes, recordings

    async def score(self, request: Request) -> JsonResponse:
        """Score tokens. If the client leaves, the engine stops, and ClientDisconnect is raised."""
        self._access.check_admin(key_of(request))
        with self._bodies.upload(request.scope, headers_of(request.scope), request.receive) as upload:
            body, size = await upload.decode_turn_object(await upload.read())
            asked = await upload.do(size, _parse, body)
            sender = upload.sender
        named = self._routes.names.find(asked.model)
        route = self._routes.engine(named.route)
        check_scores(route.gate.info(), asked.temperature)
        prompts = await self._prompts(asked, route)
        adapter = route.begin(None, named.version)
        try:
            wanted = [prompt.scored for prompt in prompts]
            found = await score_all(
                request.receive, self._turns, route, adapter, wanted, asked.temperature, asked.top_k, sender
            )
        finally:
            route.adapters.end(adapter)
        rows = zip(prompts, found, strict=True)
        data = [_row(index, prompt, scores, asked.top_k) for index, (prompt, scores) in enumerate(rows)]
        return JsonResponse({"object": "list", "model": route.name or route.model, "data": data})

    async def _prompts(self, asked: _Asked, route: EngineRoute) -> list[_Prompt]:
        """The tokens to score, in the order of the request. Raises NotFound for turns that do not exist."""
        if asked.prompts:
            return [_Prompt(Scored(ids, asked.start)) for ids in asked.prompts]
        if asked.session_id is not None:
            nodes = build_tree(await self._recordings.load_tokens(asked.session_id))
            if not nodes:
                raise NotFound(f"the session {brief(asked.session_id)} has no complete turn", param="session_id")
            chosen = [node for node in nodes.values() if node.interaction.output_ids]
        else:
            chosen = await self._named(asked.interaction_ids)
        for turn in {node.interaction.route: node.interaction for node in chosen}.values():
            await asyncio.to_thread(check_tokens, self._routes, turn, route)
        return [_Prompt(scored_output(node, self._images), node.interaction) for node in chosen]

    async def _named(self, ids: Sequence[str]) -> list[Branch]:
        nodes: dict[str, Branch] = {}
        for session_id in await self._recordings.sessions_of(ids):
            nodes |= build_tree(await self._recordings.load_tokens(session_id))
        for index, each in enumerate(ids):
            if each not in nodes:
                raise NotFound(f"no complete turn has the id {brief(each)}", param=f"interaction_ids[{index}]")
            if not nodes[each].interaction.output_ids:
                raise InvalidRequest(f"the turn {brief(each)} has no sampled tokens", param=f"interaction_ids[{index}]")
        return [nodes[each] for each in ids]


def _parse(body: Mapping[str, Any]) -> _Asked:
    check_given(body, _FIELDS)
    given = [name for name in _TOKENS if body.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest("give one of 'input_ids', 'interaction_ids' and 'session_id'", param=(given or _TOKENS)[0])
    if body.get("start") is not None and given != ["input_ids"]:
        raise InvalidRequest("'start' belongs to 'input_ids'; of recorded turns the output is scored", param="start")
    start = optional_int(body, "start", least=1) or 1
    prompts = _prompts(body["input_ids"], start) if given == ["input_ids"] else ()
    names = () if body.get("interaction_ids") is None else _names(body["interaction_ids"])
    temperature = optional_float(body, "temperature", least=1e-3, most=100.0)
    return _Asked(
        prompts,
        names,
        optional_text(body, "session_id"),
        start,
        optional_text(body, "model") or "",
        1.0 if temperature is None else temperature,
        optional_int(body, "top_k", least=0, most=_MOST_ALTERNATIVES) or 0,
    )


def _prompts(value: Any, start: int) -> tuple[Ids, ...]:
    """The sequences of `input_ids`: a list of token ids, or a list of such lists."""
    lists = expect_list(value, "input_ids")
    several = bool(lists) and isinstance(lists[0], list)
    if several and len(lists) > _MOST_PROMPTS:
        raise InvalidRequest(
            f"'input_ids' must have at most {_MOST_PROMPTS} lists, not {len(lists)}", param="input_ids"
        )
    named = [(f"input_ids[{n}]", each) for n, each in enumerate(lists)] if several else [("input_ids", lists)]
    prompts = tuple(parse_token_ids(each, name) for name, each in named)
    for (name, _), ids in zip(named, prompts, strict=True):
        if len(ids) <= start:
            raise InvalidRequest(f"'{name}' has {len(ids)} ids, so none to score from position {start} on", param=name)
    return prompts


def _names(value: Any) -> tuple[str, ...]:
    names = [expect_text(each, f"interaction_ids[{n}]") for n, each in enumerate(expect_list(value, "interaction_ids"))]
    if not 1 <= len(names) <= _MOST_PROMPTS:
        raise InvalidRequest(f"'interaction_ids' must have 1 to {_MOST_PROMPTS} ids", param="interaction_ids")
    return tuple(names)


def _row(index: int, prompt: _Prompt, scores: Scores, top: int) -> dict[str, Any]:
    turn = {} if prompt.turn is None else {"session_id": prompt.turn.session_id, "interaction_id": prompt.turn.id}
    tops = {"top_logprobs": [[list(pair) for pair in row] for row in scores.tops]} if top else {}
    return {
        "index": index,
        **turn,
        "start": prompt.scored.start,
        "logprobs": np.asarray(scores.logprobs),
        **tops,
        "version": scores.version,
        "cached_tokens": scores.cached_tokens or 0,
    }
