"""Words that replies and exports give as reasons, each with its meaning: the one text for docs and `--help`."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Explained(StrEnum):
    """An enum of words that replies and exports use as reasons. Docs and `tokengrove show --help` print `meaning`."""

    _value_: str
    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member

    @classmethod
    def _of_newer_version(cls, value: object) -> Self:
        """A word that a newer server wrote into the same database, shown as it is."""
        word = str.__new__(cls, value)
        word._name_ = word._value_ = str(value)
        word.meaning = "A newer version wrote it."
        return word


class Status(Explained):
    """The state of an interaction."""

    BEGUN = "begun", "the server stopped in the middle; only the start is known"
    COMPLETE = "complete", "the engine ended the output, and it is on the disk"
    FAILED = "failed", "the engine or the server failed; what was sampled is kept"
    ABORTED = (
        "aborted",
        "the client left before the end and did not come back within a grace period, or the server stopped",
    )
    SUPERSEDED = "superseded", "a failed or aborted attempt that a retry replaced"


class FinishReason(Explained):
    """Why sampling ended. Each API maps these to its own values."""

    STOP = "stop", "the model ended its turn"
    LENGTH = "length", "`max_tokens`, a limit of the session or the context was reached"
    TOOL_CALLS = "tool_calls", "the model ended its turn with tool calls"
    STOP_STRING = "stop_string", "one of the request's stop strings came; the interaction's `stop_string` names it"
    CONTENT_FILTER = "content_filter", "the engine, or whoever delivered the answer, filtered it"
    ABORT = "abort", "the engine ended the request; such a turn is stored as failed"


class Reason(Explained):
    """Why an interaction stands where it does in the tree: how it relates to its parent and siblings."""

    FIRST = "first", "The first turn of the session."
    CONTINUED = "continued", "The request repeats a conversation and adds messages, as every agent loop does."
    RESAMPLED = (
        "resampled",
        "Exactly the same conversation was asked before, and this is not a retry: best of n, another temperature.",
    )
    BRANCHED = (
        "branched",
        "The request continues a conversation that was continued before: the agent went back, or runs in parallel.",
    )
    REWRITTEN = (
        "rewritten",
        "An earlier answer of the model was replaced by another assistant message: the client edited or summarised it.",
    )
    TOOLS_CHANGED = (
        "tools_changed",
        "The conversation is known, but under other tools: a mode switch, an MCP server that came or went.",
    )
    SYSTEM_CHANGED = (
        "system_changed",
        "The conversation is known, but under another system prompt: a date or a file list in it.",
    )
    OPTIONS_CHANGED = (
        "options_changed",
        "The conversation is known, but under other chat template options, such as `enable_thinking`.",
    )
    NEW_ROOT = (
        "new_root",
        "A conversation that has nothing in common with the others: a sub-agent, a title, a compaction.",
    )
    TEMPLATE = (
        "template",
        "There is a parent, but the chat template rewrites earlier turns (drops reasoning, for example), so the prompt "
        "was rendered anew and does not begin with the parent's tokens.",
    )
    DRIFT = (
        "drift",
        "There is a parent and its prompt was extended, but the result does not begin with the parent's tokens. This "
        "is a bug; please report it.",
    )

    @classmethod
    def _missing_(cls, value: object) -> Self:
        return cls._of_newer_version(value)


class Echo(Explained):
    """How a client changed answers of ours that it sent back, where the turn goes on with the sampled tokens anyway."""

    TEXT_DROPPED = "text_dropped", "Calls came back without the text beside them: it is empty, null or missing."
    REASONING_AS_TEXT = (
        "reasoning_as_text",
        "The reasoning came back as text, alone or beside our text, with or without tags such as `<thinking>`.",
    )
    SPLIT = (
        "split",
        "One answer came back as several assistant messages: text and calls, or call by call, also with the results "
        "in between or with the same text in each; or its reasoning in tags, then its text.",
    )
    JOINED = (
        "joined",
        "Answers that followed each other came back without results in between: all of these stand after them.",
    )
    NULLS_ADDED = (
        "nulls_added",
        "Arguments came back with nulls for keys that the tool's schema makes optional, at any depth.",
    )

    @classmethod
    def _missing_(cls, value: object) -> Self:
        return cls._of_newer_version(value)
