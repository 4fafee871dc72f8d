"""The JSON of a turn's tokens (`include=tokens`): the role of each token, and its state in an export."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from proxy.api.http import encode_json
from proxy.rendering.token_texts import Texts, TokenTexts
from proxy.trajectory.compared import turn_numbers
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.trajectory.session_samples import SessionSamples
from proxy.trajectory.token_path import Break, PartKind, PathPart, Section, StateRun, TokenStates, token_path
from proxy.trajectory.tree import Branch, build_tree, images_of
from proxy.types import Interaction, SessionRecord
from tokengrove.reasons import Status


def tokens_json(
    record: SessionRecord,
    interactions: Sequence[Interaction],
    turn: Interaction,
    options: LayoutOptions,
    texts: TokenTexts | None = None,
) -> dict[str, Any]:
    """The tokens of a turn's prompt and output. `interactions`: all of its session, in order of `seq`.

    `options`: of the export to which the states apply. Without `texts`, all texts are null.
    """
    nodes, numbers = build_tree(interactions), turn_numbers(interactions)
    node = nodes.get(turn.id) or Branch(turn, nodes.get(turn.parent_id or ""), 0)
    path, images = token_path(node, options.drift), images_of(node)
    session_samples = lay_out(record, interactions, options)
    states = TokenStates(session_samples, options.layout).of(path.parts, images)
    ids = path.ids.tolist()
    return {
        "ids": ids,
        **_texts(None if texts is None else texts.of(ids), len(ids)),
        "logprobs": _logprobs(path.parts, len(ids)),
        "versions": list(_versions(path.parts)),
        "parts": [_part(part, numbers) for part in path.parts],
        "states": [_state(run, numbers) for run in states],
        "meanings": {run.state.value: _meaning(run) for run in states},
        "sections": [_section(section, numbers, texts) for section in path.sections],
        "images": [image.to_json() for image in images],
        "recorded": sorted({name for part in path.parts for name in part.interaction.replay}),
        "lost": [_turn(interaction, numbers) for interaction in path.lost],
        "export": _export(session_samples, options),
    }


def encoded_tokens(*given: Any) -> orjson.Fragment:
    """`tokens_json`, encoded for a reply in the thread that made it, because many tokens take long."""
    return orjson.Fragment(encode_json(tokens_json(*given)))


def _texts(found: Texts | None, length: int) -> dict[str, Any]:
    if found is None:
        return {"texts": [None] * length, "continues": [], "broken": [], "special": []}
    return {name: getattr(found, name) for name in ("texts", "continues", "broken", "special")}


def _logprobs(parts: Iterable[PathPart], length: int) -> list[float | None]:
    """The logprobs of sampled tokens, with the digits of an export; null for other tokens and missing values."""
    found: list[float | None] = [None] * length
    for part in _outputs(parts):
        if part.interaction.has_logprobs:
            found[part.start : part.end] = orjson.loads(encode_json(np.asarray(part.interaction.logprobs, np.float32)))
    return found


def _versions(parts: Iterable[PathPart]) -> Iterable[dict[str, int]]:
    """The weight versions of sampled tokens, in runs."""
    for part in _outputs(parts):
        start = part.start
        for count, version in part.interaction.versions:
            yield {"start": start, "end": start + count, "version": version}
            start += count


def _outputs(parts: Iterable[PathPart]) -> Iterable[PathPart]:
    return (part for part in parts if part.kind is PartKind.OUTPUT)


def _part(part: PathPart, numbers: Mapping[str, int]) -> dict[str, Any]:
    return {**_turn(part.interaction, numbers), "kind": part.kind.value, "start": part.start, "end": part.end}


def _state(run: StateRun, numbers: Mapping[str, int]) -> dict[str, Any]:
    sample = None if run.sample is None else {"interaction_id": run.sample, "turn": numbers.get(run.sample)}
    return {"start": run.start, "end": run.end, "state": run.state.value, "sample": sample}


def _meaning(run: StateRun) -> str:
    """The meaning of a state, as a continuation of "this token"."""
    if isinstance(run.state, Status):
        return f"belongs to a turn that no export has: {run.state.meaning}"
    return run.state.meaning


def _section(section: Section, numbers: Mapping[str, int], texts: TokenTexts | None) -> dict[str, Any]:
    return {
        "turns": [_turn(interaction, numbers) for interaction in section.interactions],
        "tokens": section.tokens,
        "differs": None if section.differs is None else _break(section.differs, texts),
    }


def _break(found: Break, texts: TokenTexts | None) -> dict[str, Any]:
    """Like `compared.token`."""
    sides = {"sent": list(found.sent), "recorded": list(found.recorded)}
    spelled = {f"{side}_text": None if texts is None else "".join(texts.of(ids).texts) for side, ids in sides.items()}
    return {"index": found.index, **sides, **spelled}


def _turn(interaction: Interaction, numbers: Mapping[str, int]) -> dict[str, Any]:
    return {"interaction_id": interaction.id, "turn": numbers.get(interaction.id)}


def _export(session_samples: SessionSamples, options: LayoutOptions) -> dict[str, Any]:
    """The token counts in the session's entry of that export, and the options of the export."""
    left_out = session_samples.entry["left_out"]
    return {
        "layout": options.layout.value,
        "drift": options.drift.value,
        "samples": len(session_samples.rows),
        "left_out": left_out,
        **session_samples.counts(options),
    }
