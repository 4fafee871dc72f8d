"""The reasons in replies and exports, each with its meaning: the only text for docs and `--help`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple, Self


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
        """A word that a newer server wrote to the same database. It is shown unchanged."""
        word = str.__new__(cls, value)
        word._name_ = word._value_ = str(value)
        word.meaning = "A newer version wrote it."
        return word


class LogprobsOf(Explained):
    """The distribution that the logprobs of an answer are of, in order of their distance from the rule of
    `proxy.engine.chunks`."""

    RULE = "rule", "after penalties, bias, temperature and grammar, before top-k, top-p and min-p"
    SAMPLED = "sampled", "after top-k, top-p and min-p as well, renormalised"
    MODEL = "model", "the model's own at temperature 1, before all but a grammar's mask"

    @classmethod
    def _missing_(cls, value: object) -> Self:
        return cls._of_newer_version(value)

    @classmethod
    def furthest(cls, words: Iterable[LogprobsOf]) -> LogprobsOf:
        """The word furthest from the rule; `rule` without words. Words of a newer version are the furthest."""
        known = list(cls)
        return max(words, key=lambda word: known.index(word) if word in known else len(known), default=cls.RULE)


class Status(Explained):
    """The state of an interaction."""

    BEGUN = "begun", "the server stopped in the middle; only the start is known"
    COMPLETE = "complete", "the engine ended the output, and it is on the disk"
    FAILED = "failed", "the engine or the server failed; what was sampled is kept"
    ABORTED = "aborted", "the client left for longer than a grace period, or the server stopped"
    SUPERSEDED = "superseded", "a failed or aborted attempt that a retry replaced"


class FinishReason(Explained):
    """Why sampling ended. Each API maps these to its own values."""

    STOP = "stop", "the model ended its turn"
    LENGTH = "length", "`max_tokens`, a limit of the session or the context was reached"
    TOOL_CALLS = "tool_calls", "the model ended its turn with tool calls"
    STOP_STRING = "stop_string", "a stop string of the request came: the interaction's `stop_string`"
    CONTENT_FILTER = "content_filter", "the engine, or whoever delivered the answer, filtered it"
    ABORT = "abort", "the engine ended the request; the turn is stored as failed"


class Reason(Explained):
    """Why an interaction has its place in the tree: its relation to its parent and siblings."""

    FIRST = "first", "The first turn of the session."
    CONTINUED = "continued", "The request repeats a conversation and adds messages."
    RESAMPLED = (
        "resampled",
        "The same conversation was asked before, and this is not a retry: best of n, another temperature.",
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
        "The chat template rewrites earlier turns (drops reasoning, for example), so the prompt does not begin with "
        "the parent's tokens.",
    )
    DRIFT = (
        "drift",
        "The parent's prompt was extended, but the result does not begin with its tokens. This is a bug; please "
        "report it.",
    )

    @classmethod
    def _missing_(cls, value: object) -> Self:
        return cls._of_newer_version(value)


class Echo(Explained):
    """How a client changed the server's answers when it sent them back. The turn still continues the sampled tokens."""

    TEXT_DROPPED = "text_dropped", "Calls came back without the text beside them."
    REASONING_AS_TEXT = (
        "reasoning_as_text",
        "The reasoning came back as text, with or without tags such as `<thinking>`.",
    )
    SPLIT = (
        "split",
        "One answer came back as several assistant messages: text and calls, call by call, or its reasoning in tags, "
        "then its text.",
    )
    JOINED = "joined", "Answers that followed each other came back without results in between."
    NULLS_ADDED = "nulls_added", "Arguments came back with nulls for keys that the tool's schema makes optional."

    @classmethod
    def _missing_(cls, value: object) -> Self:
        return cls._of_newer_version(value)


class Note(Explained):
    """The names of notes."""

    DROPPED = "dropped", "fields of the request that had no effect"
    BEST_EFFORT = "best_effort", "sampling parameters that the engine took without a promise"
    ECHO = "echo", "how the client changed answers of ours that it sent back in the history"
    PREFILL = "prefill", "how many characters of the answer's text the client wrote itself; their tokens are context"
    IDEMPOTENCY_KEY = "idempotency_key", "the client's header of that name, by which its retries are known"
    REQUEST_ID = "request_id", "the `x-request-id` that the client sent with the request of this turn"
    GRAMMAR = "grammar", "true: sampled under a grammar, as forced calls and JSON answers are"
    SAMPLED = "sampled", "false: the answer came without logprobs, so it is never trained"
    LOGPROBS_OF = (
        "logprobs_of",
        "`sampled` or `model`: the distribution that the logprobs are of, if the engine cannot report them by the rule",
    )
    VERSION = "version", "`uncertain`: some tokens have the last weight version that is believed, not one that is known"
    MALFORMED_CALLS = "malformed_calls", "how many tool calls could not be parsed and were left as text"
    REPLAY = "replay", "the side columns that the turn recorded, each with its number of missing rows"
    ROUTE = "route", "the name in the table of models that answered; replies show it beside the notes"
    ROUTE_KIND = "route_kind", "`frozen` or `external`; replies show it beside the notes"
    ADAPTER = "adapter", "the version of the LoRA adapter that sampled the turn"
    EXTERNAL = (
        "external",
        "the `model` of another server that answered, in its own words, and the counts of tokens it told",
    )
    LINEAGE = "lineage", "which earlier turns the conversation came `from`, its `kind`, and the `evidence`"
    THREAD = "thread", "the `id` of the client's thread, and of its `parent`, as its headers name them"
    SAMPLED_BY = (
        "sampled_by",
        "which engine server sampled the tokens from index `start` of the output on, with the `dtype` and the "
        "`quantization` of its weights, as far as the engine tells them",
    )


class Segment(Explained):
    """How a conversation of a session came about: from no earlier one, or how from one."""

    NEW = "new", "came from no earlier conversation of its session"
    COMPACTION = "compaction", "goes on after the history was replaced, by a summary or by fewer messages"
    SUMMARY = "summary", "asks for a summary, in a conversation of its own"
    SUBAGENT = "subagent", "is the work of a sub-agent that the turn called"
    HEAD = "head", "goes on with other tools, another system prompt or other options"
    RESET = "reset", "begins again in the same thread of the client, and nothing shows how"


class Evidence(Explained):
    """What shows that a conversation came from an earlier one. All but the last are inferred from texts and ids."""

    MESSAGES = "messages", "its messages begin with all messages of the turn's conversation"
    SUMMARY = "summary", "a message contains the text of the summary"
    CALL = "call", "a user's message is, or ends with, an argument of the tool call"
    ANSWERS = "answers", "its messages have the answer of the turn, or ids of its calls"
    THREAD = "thread", "the client names the thread in a header"


class Differs(Explained):
    """The first difference between a forked turn and the nearest turn."""

    ROLE = "role", "another role stands at this place"
    CONTENT = "content", "the text of the message differs"
    TOOL_CALLS = "tool_calls", "the calls of the answer differ: their number, a name or the arguments"
    TOOL_CALL_ID = "tool_call_id", "the tool result answers another call"
    IMAGES = "images", "the images of the message differ"
    ENCODED_ANEW = (
        "encoded_anew",
        "the images of the message show the same pictures, but were encoded anew: their bytes differ, so it is another "
        "message; send an image again as it was sent first",
    )
    REMOVED = "removed", "messages of the nearest turn are missing here; the one after them follows"
    INSERTED = "inserted", "messages stand here that the nearest turn lacks; its own follow"
    ENDED = "ended", "the conversation ends here, and that of the nearest turn goes on"
    TOOLS = "tools", "all messages agree, but the tools differ"
    TEMPLATE_OPTIONS = "template_options", "all messages agree, but the chat template options differ"
    TOKENS = "tokens", "the token ids of the prompt differ"
    SAME = "same", "nothing differs: the same conversation was sampled again"
    LATE = "late", "nothing differs: the nearest turn was committed only after this one had begun"


class TokenState(Explained):
    """The state of a token without a reason to leave it out."""

    CONTEXT = "context", "was not sampled on this path: a message, a tool result, or text of the chat template"
    TRAINED = "trained", "is trained, in one sample of the export"
    IMAGE = "image", "stands for an image of the prompt"


class RunKind(Explained):
    """The kind of the tokens in a run."""

    PADDING = "padding", "fills the row (layout `padded`)"
    PROMPT = "prompt", "the prompt, before anything was sampled"
    CONTEXT = "context", "what came between answers: tool results, messages of users, marks of the template"
    SAMPLED = "sampled", "was sampled by the turn, and this sample does not train it"
    TRAINED = "trained", "was sampled by the turn, and this sample trains it"


class Untrained(Explained):
    """Why a sampled token is trained in no sample.

    A token has one reason. Of the first five, it is the one nearest to training (the last that holds). The others hold
    for every sample; of these, it is the first in this order.
    """

    DRIFT = "drift", "is in no sample as sampled (`drift: mask`)"
    UNREWARDED = "unrewarded", "is in a session or path that `unrewarded: skip` leaves out"
    TOO_LONG = "too_long", "is in dropped samples (`on_too_long: drop`)"
    CUT = "cut", "was cut off by layout `padded` (`on_too_long: truncate`)"
    STALE = "stale", "is outside `min_version` or `max_version_span`"
    FROZEN = "frozen", "was sampled by a route that is never trained (`route_kind`)"
    ROUTE = "route", "belongs to a turn of another `route`"
    FILTER = "filter", "belongs to a turn that `filter` (`purpose`, `agent`) leaves out"
    NO_LOGPROBS = "no_logprobs", "came from the engine without a logprob"
    UNFINISHED = "unfinished", "belongs to a session that ended with `finished: false` (`mask_unfinished`)"
    TRAIN = "train", "belongs to a turn that `train` leaves out"
    MARK = "mark", "was marked with `trainable: false`, or is outside the marked `spans`"
    LOGPROBS = "logprobs", "has a logprob that is not by the rule, and `train.logprobs` is `rule`"
    GRAMMAR = "grammar", "was sampled under a grammar, and `train.constrained` is false"
    PLACEHOLDER = "placeholder", "stands for an image that is not there"


class LeftOut(Explained):
    """Why a session is left out of an export: the first three by `unrewarded: skip`, the others by the filter."""

    ACTIVE = "active", "still runs"
    FAILED = "failed", "ended with the outcome `Failed`"
    UNREWARDED = "unrewarded", "has no reward of the kind that counts"
    VALIDATION = "validation", "has `validate: true` in its metadata, and was neither named nor asked for"
    WITHDRAWN = "withdrawn", "was withdrawn, and is not named"


class Unmerged(Explained):
    """Why tokens with equal ids, after equal ids, are apart in a sequence of layout forest."""

    IMAGES = "images", "stand for different images"
    SAMPLED = "sampled", "were sampled, and each is trained with its own sample"
    EXPERTS = "experts", "have different experts (`experts: equal`)"


class Unrecomputable(Explained):
    """Why the logprobs of an answer differ from a trainer's. If several hold, the first in this order is reported."""

    DRIFT = (
        "drift",
        "were sampled after other tokens than those before it in this sample, or it is not in it as sampled "
        "(`drift: mask`)",
    )
    CUT = "cut", "were sampled after tokens that layout `padded` cut off, or the answer is cut off"
    GRAMMAR = (
        "grammar",
        "are of the distribution that the grammar left (forced tool calls, JSON answers), without kept sets",
    )
    SAMPLED = "sampled", "are of the distribution that top-p, top-k or min-p left, renormalised, without kept sets"
    BIAS = "bias", "are of the distribution with `logit_bias`, or without end tokens before `min_tokens`"
    PENALTIES = "penalties", "are of the distribution with penalties"
    MODEL = "model", "are the model's at temperature 1, and the sampling parameters changed the distribution"
    TRUNCATED = "truncated", "are the model's, and top-p, top-k or min-p cut the distribution, without kept sets"


class Question(NamedTuple):
    """A field with reasons: its heading for people, and its words."""

    heading: str
    words: type[Explained]


BY_FIELD: Mapping[str, Question] = {
    "reason": Question("Where a turn stands in the tree (reason)", Reason),
    "why": Question("What differs first from the nearest turn (why)", Differs),
    "status": Question("What became of a turn (status)", Status),
    "finish_reason": Question("Why sampling ended (finish_reason)", FinishReason),
    "notes": Question("What the notes of a turn say (notes)", Note),
    "echo": Question("What a client changed in answers that it sent back (echo in the notes)", Echo),
    "states": Question("What becomes of a token (--tokens): it", TokenState),
    "runs": Question("What the tokens of a sample are (--samples): it", RunKind),
    "untrained_tokens": Question("Why a token is not trained (untrained_tokens): the token", Untrained),
    "left_out": Question("Why a session is left out of an export (left_out): it", LeftOut),
    "logprobs_of": Question("Which distribution logprobs are of (logprobs_of): it is", LogprobsOf),
    "lineage": Question("How a conversation came from an earlier one (lineage): it", Segment),
    "evidence": Question("What shows it (evidence of lineage)", Evidence),
    "unmerged_tokens": Question("Why equal tokens of samples are apart in layout forest: they", Unmerged),
    "recomputable": Question("Why logprobs cannot be computed again (recomputable): they", Unrecomputable),
}
"""The words by the field of an answer that has them."""
