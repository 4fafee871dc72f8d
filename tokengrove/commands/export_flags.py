"""The flags of `tokengrove export --url`: one for each field of the body of `/trajectories/export`.

The server checks the values, so only what a body cannot express is checked here. The module is separate from the
client so that `tokengrove --help` does not import the client.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokengrove.errors import ConfigurationError

_SESSIONS, _SAMPLES, _TRAIN, _PADDED = (
    "Which sessions and turns",
    "How samples are made",
    "What is trained",
    "Layout padded",
)
_FILTERS = (
    *("task", "status", "outcome", "since", "validation", "purpose", "agent", "min_version", "max_version_span"),
)
_CONDITION = re.compile(r"(?P<key>[^<>=]+)(?P<how>>=|<=|=)(?P<value>.*)", re.DOTALL)
_RANGE = {">=": "min", "<=": "max"}
_PURPOSES = "main, title, summary, subagent or aux"
_WIRE_NAMES = {"session": "session_ids", "group": "group_id", "task": "task_id", "page_size": "limit"}


def _flag(panel: str, text: str, default: Any = None, **bounds: int) -> Any:
    return field(default=default, metadata={"help": text, "panel": panel, "bounds": bounds})


@dataclass(frozen=True, slots=True)
class ExportFlags:
    """The given flags; None and () mean the server's default."""

    session: tuple[str, ...] = _flag(_SESSIONS, "Only this session; repeatable.", ())
    group: str | None = _flag(_SESSIONS, "Only sessions of this group.")
    task: str | None = _flag(_SESSIONS, "Only sessions of this task.")
    status: str | None = _flag(_SESSIONS, "Only active, ended or expired sessions.")
    outcome: str | None = _flag(_SESSIONS, "Only Finished, Failed, NoData or Timeout.")
    since: float | None = _flag(
        _SESSIONS, "Only sessions that ended at this time (Unix seconds) or later, and live ones."
    )
    metadata: tuple[str, ...] = _flag(
        _SESSIONS, "Only sessions with this metadata: KEY=VALUE, KEY>=NUMBER or KEY<=NUMBER; repeatable.", ()
    )
    metric: tuple[str, ...] = _flag(
        _SESSIONS, "Only sessions with this metric: NAME=VALUE, NAME>=NUMBER or NAME<=NUMBER; repeatable.", ()
    )
    rewarded: str | None = _flag(_SESSIONS, "true or false: only sessions with, or without, a reward.")
    validation: str | None = _flag(
        _SESSIONS, "Sessions for validation: skip, include or only (default skip, but include those of --session)."
    )
    min_version: int | None = _flag(
        _SESSIONS, "Only samples whose trained tokens all have at least this weight version."
    )
    max_version_span: int | None = _flag(
        _SESSIONS, "Only samples whose trained tokens span at most this many weight versions."
    )
    purpose: tuple[str, ...] = _flag(_SESSIONS, f"Only turns of this purpose ({_PURPOSES}); repeatable.", ())
    agent: tuple[str, ...] = _flag(_SESSIONS, "Only turns of this agent; repeatable.", ())
    wait_s: float | None = _flag(_SESSIONS, "Wait up to this many seconds until every --session has ended.")
    layout: str = _flag(_SAMPLES, "individual, concat, tree or padded.", "concat")
    format: str | None = _flag(
        _SAMPLES,
        "jsonl (one sample per line), json, areal, npz, safetensors, arrow or parquet (default: as the file is named; "
        "jsonl in a folder).",
    )
    page_size: int | None = _flag(_SAMPLES, "Sessions per file of a folder (default 100).", min=1, max=1000)
    discount: float | None = _flag(_SAMPLES, "Discount of the returns (default: the session's).")
    credit: str | None = _flag(_SAMPLES, "tree or linear: how rewards flow back (default: the session's).")
    drift: str | None = _flag(_SAMPLES, "fork or mask: how to export turns that cannot be joined (default fork).")
    include: tuple[str, ...] = _flag(_SAMPLES, "Also include messages or text; repeatable.", ())
    images: str | None = _flag(
        _SAMPLES, "Of images: references (where they stand), bytes (each once a page) or none (default references)."
    )
    multi_modal_inputs: bool = _flag(
        _SAMPLES, "Also what the model's processor made of images, and the positions of models that see.", False
    )
    reward_name: str | None = _flag(_SAMPLES, "Name of the reward to use (default: the unnamed one).")
    reward_granularity: str | None = _flag(_SAMPLES, "pass_rate or binary, as in ROLL: that metric, else the score.")
    reward_scope: str | None = _flag(
        _SAMPLES, "session, path or agent: whose rewards a sample sums (default: the session's; for format areal path)."
    )
    unrewarded: str | None = _flag(
        _SAMPLES,
        "Sessions that run, failed or have no reward: skip or zero (default: skip with advantages, else zero).",
    )
    advantages: str | None = _flag(_SAMPLES, "grpo or leave_one_out: add a column of advantages within each group.")
    step_advantages: str | None = _flag(
        _SAMPLES, "grpo or leave_one_out: advantages among turns with the same state_hash."
    )
    train_turns: str | None = _flag(
        _TRAIN, "Turns to train: all, last, or indexes like 0,2 (default all); the rest is context."
    )
    train_purpose: tuple[str, ...] = _flag(_TRAIN, f"Train only turns of this purpose ({_PURPOSES}); repeatable.", ())
    train_agent: tuple[str, ...] = _flag(_TRAIN, "Train only turns of this agent; repeatable.", ())
    exclude: tuple[str, ...] = _flag(_TRAIN, "Do not train the interaction with this id; repeatable.", ())
    train_constrained: bool = _flag(
        _TRAIN, "Also train what was sampled under a grammar: forced tool calls and JSON answers.", False
    )
    mask_unfinished: bool = _flag(_TRAIN, "Train nothing of sessions that ended with finished: false.", False)
    prompt_length: int | None = _flag(_PADDED, "Length of prompts in tokens, padded on the left.")
    response_length: int | None = _flag(_PADDED, "Length of responses in tokens, padded on the right.")
    pad_token_id: int | None = _flag(_PADDED, "Token id of the padding (default 0).")
    on_too_long: str | None = _flag(_PADDED, "Samples that do not fit: refuse, drop or truncate (default refuse).")
    keep: str | None = _flag(_PADDED, "Part of a truncated response to keep: head, tail or middle (default head).")

    def body(self) -> dict[str, Any]:
        """Return the request body of the given flags. Raises ConfigurationError."""
        given = {name: getattr(self, name) for name in self.__dataclass_fields__}
        filters = {name: given.pop(name) for name in ("group", *_FILTERS)}
        filters["metadata"] = _conditions("--metadata", given.pop("metadata"))
        filters["metrics"] = _conditions("--metric", given.pop("metric"))
        rewarded = given.pop("rewarded")
        train = {
            "turns": _turns(given.pop("train_turns")),
            "purposes": given.pop("train_purpose"),
            "agents": given.pop("train_agent"),
            "exclude": given.pop("exclude"),
            "constrained": given.pop("train_constrained"),
        }
        chosen = _given(filters)
        if rewarded is not None:
            chosen["rewarded"] = {"true": True, "false": False}.get(rewarded, rewarded)  # the server checks words
        return _given({**given, "filter": chosen, "train": _given(train)})


def _conditions(flag: str, given: Sequence[str]) -> dict[str, Any]:
    """By key a value, a list of values, or a range. Values are JSON, else text. Raises ConfigurationError."""
    values: dict[str, list[Any]] = {}
    ranges: dict[str, dict[str, Any]] = {}
    for text in given:
        found = _CONDITION.fullmatch(text)
        value = _json(found["value"]) if found else None
        if found is None or (found["how"] in _RANGE and type(value) not in (int, float)):
            raise ConfigurationError(f"{flag} {text} is not valid; give KEY=VALUE, KEY>=NUMBER or KEY<=NUMBER")
        key, how = found["key"], found["how"]
        if how in _RANGE:
            ranges.setdefault(key, {})[_RANGE[how]] = value
        else:
            values.setdefault(key, []).append(value)
        if key in values and key in ranges:
            raise ConfigurationError(f"{flag} {text} does not go with another value or range of {key}")
    return {**{key: each if len(each) > 1 else each[0] for key, each in values.items()}, **ranges}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _turns(text: str | None) -> str | list[int] | None:
    if text is None or not text[:1].isdecimal():
        return text  # the server checks words
    try:
        return [int(index) for index in text.split(",")]
    except ValueError:
        raise ConfigurationError(f"--train-turns {text} is not valid; give all, last, or indexes like 0,2") from None


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are given, under the names of the HTTP body; tuples as lists."""
    named = {_WIRE_NAMES.get(name, name): value for name, value in values.items()}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in named.items()
        if value is not None and value is not False and value not in ((), {})
    }
