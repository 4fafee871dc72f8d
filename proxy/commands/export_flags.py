"""The flags of `tokengrove export --url`: one for each field of the body of `/export_trajectories`.

The server knows the choices and refuses what is none, so nothing is checked here but what no body could say. It stands
apart from the client, which the command line imports only where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy.errors import ConfigurationError

_SESSIONS, _SAMPLES, _TRAIN, _PADDED = (
    "Which sessions and turns",
    "How samples are made",
    "What is trained",
    "Layout padded",
)
_FILTERS = ("task", "status", "outcome", "since", "purpose", "agent", "min_version", "max_version_span")
_PURPOSES = "main, title, summary, subagent or aux"
_WIRE_NAMES = {"session": "session_ids", "group": "group_id", "task": "task_id", "page_size": "limit"}


def _flag(panel: str, text: str, default: Any = None, **bounds: int) -> Any:
    return field(default=default, metadata={"help": text, "panel": panel, "bounds": bounds})


@dataclass(frozen=True, slots=True)
class ExportFlags:
    """What was given; None and () leave it to the server."""

    session: tuple[str, ...] = _flag(_SESSIONS, "Only this session; may be given again.", ())
    group: str | None = _flag(_SESSIONS, "Only sessions of this group.")
    task: str | None = _flag(_SESSIONS, "Only sessions of this task.")
    status: str | None = _flag(_SESSIONS, "Only active, ended or expired sessions.")
    outcome: str | None = _flag(_SESSIONS, "Only Finished, Failed, NoData or Timeout.")
    since: float | None = _flag(_SESSIONS, "Only those that ended at this time (Unix seconds) or later, and live ones.")
    min_version: int | None = _flag(_SESSIONS, "Only samples that train no token of an older weight version.")
    max_version_span: int | None = _flag(_SESSIONS, "Only samples that train tokens at most so many versions apart.")
    purpose: tuple[str, ...] = _flag(_SESSIONS, f"Only turns of this purpose ({_PURPOSES}); may be given again.", ())
    agent: tuple[str, ...] = _flag(_SESSIONS, "Only turns of this agent; may be given again.", ())
    wait_s: float | None = _flag(_SESSIONS, "Wait so long until every --session has ended.")
    layout: str = _flag(_SAMPLES, "individual, concat, tree or padded.", "concat")
    format: str = _flag(_SAMPLES, "jsonl (a sample a line), json, areal, npz, safetensors, arrow or parquet.", "jsonl")
    page_size: int = _flag(_SAMPLES, "Sessions a file.", 100, min=1, max=1000)
    discount: float | None = _flag(_SAMPLES, "Of the returns; none: the session's own.")
    credit: str | None = _flag(_SAMPLES, "tree or linear; none: the session's own.")
    drift: str | None = _flag(_SAMPLES, "fork or mask: what becomes of turns that cannot be joined (default fork).")
    include: tuple[str, ...] = _flag(_SAMPLES, "messages or text, beside the tokens; may be given again.", ())
    reward_name: str | None = _flag(_SAMPLES, "The named reward that counts; none: the one without a name.")
    reward_granularity: str | None = _flag(_SAMPLES, "pass_rate or binary, as ROLL's.")
    advantages: str | None = _flag(_SAMPLES, "grpo or leave_one_out: a column that compares the sessions of a group.")
    step_advantages: str | None = _flag(_SAMPLES, "grpo or leave_one_out, among turns of equal state.")
    train_turns: str | None = _flag(_TRAIN, "all, last, or indexes like 0,2 (default all); the rest is context.")
    train_purpose: tuple[str, ...] = _flag(_TRAIN, f"Only turns of this purpose ({_PURPOSES}); may be given again.", ())
    train_agent: tuple[str, ...] = _flag(_TRAIN, "Only turns of this agent; may be given again.", ())
    exclude: tuple[str, ...] = _flag(_TRAIN, "Not the interaction of this id; may be given again.", ())
    mask_unfinished: bool = _flag(_TRAIN, "Nothing of sessions that ended with finished: false.", False)
    prompt_length: int | None = _flag(_PADDED, "Tokens of a prompt, padded on the left.")
    response_length: int | None = _flag(_PADDED, "Tokens of a response, padded on the right.")
    pad_token_id: int | None = _flag(_PADDED, "What they are padded with (default 0).")
    on_too_long: str | None = _flag(_PADDED, "refuse, drop or truncate (default refuse).")
    keep: str | None = _flag(_PADDED, "head, tail or middle of a response that is cut (default head).")

    def body(self) -> dict[str, Any]:
        """The body of a request, without what was not given. Raises ConfigurationError."""
        given = {name: getattr(self, name) for name in self.__dataclass_fields__}
        filters = {name: given.pop(name) for name in ("group", *_FILTERS)}
        train = {
            "turns": _turns(given.pop("train_turns")),
            "purposes": given.pop("train_purpose"),
            "agents": given.pop("train_agent"),
            "exclude": given.pop("exclude"),
        }
        return _said({**given, "filter": _said(filters), "train": _said(train)})


def _turns(text: str | None) -> str | list[int] | None:
    if text is None or not text[:1].isdecimal():
        return text  # a word, which the server knows or refuses
    try:
        return [int(index) for index in text.split(",")]
    except ValueError:
        raise ConfigurationError(f"--train-turns {text}: write all, last, or indexes like 0,2") from None


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    """What says something, named as on the wire; several values as a list."""
    named = {_WIRE_NAMES.get(name, name): value for name, value in values.items()}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in named.items()
        if value is not None and value is not False and value not in ((), {})
    }
