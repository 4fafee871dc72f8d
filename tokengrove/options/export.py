"""The options of an export: how samples are made of sessions, what is trained, and how samples are sent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from tokengrove.options.option import Conditions, option
from tokengrove.options.session import SESSIONS, Credit, Purpose, RewardScope, SessionFilter
from tokengrove.options.start import Replay

SAMPLES, TRAIN, PADDED = "How samples are made", "What is trained", "Layout padded"
FOREST = "Layout forest"
# A row has about 110 bytes per token, padding included: with both lengths at this limit it takes 250 MB at most.
_MAX_LENGTH = 1 << 20


class Layout(StrEnum):
    """How a session becomes samples.

    `individual`: one per interaction. `concat`: one per leaf, aligned turns joined. `tree`: one per session, each node
    once, for attention over shared prefixes. `padded`: concat at fixed lengths, as in verl's batches. `forest`: the
    samples of concat in packed sequences, in which the samples of a group share the tokens that they begin with. `step`
    and `traj` are other names of the first two.
    """

    INDIVIDUAL = "individual"
    CONCAT = "concat"
    TREE = "tree"
    PADDED = "padded"
    FOREST = "forest"

    @classmethod
    def _missing_(cls, value: object) -> Layout | None:
        return {"step": cls.INDIVIDUAL, "traj": cls.CONCAT}.get(str(value))


class ExportFormat(StrEnum):
    """The formats of an export."""

    JSON = "json"
    JSONL = "jsonl"
    AREAL = "areal"
    NPZ = "npz"
    SAFETENSORS = "safetensors"
    ARROW = "arrow"
    PARQUET = "parquet"


class Drift(StrEnum):
    """What becomes of a turn whose prompt does not begin with its parent's tokens (`trajectory.paths`)."""

    FORK = "fork"
    MASK = "mask"


class Include(StrEnum):
    """Additions to the entry of each turn: its messages, or the text of its output tokens."""

    MESSAGES = "messages"
    TEXT = "text"


class Images(StrEnum):
    """What an export has of images: where they stand and their bytes, each once; only where they stand; or nothing."""

    BYTES = "bytes"
    REFERENCES = "references"
    NONE = "none"


class Granularity(StrEnum):
    """ROLL's `reward_granularity`: which result of an episode its reward is, `pass_rate` or `binary`."""

    PASS_RATE = "pass_rate"
    BINARY = "binary"


class Unrewarded(StrEnum):
    """What happens to sessions without a final score: their samples are left out, or they count as rewarded with 0."""

    SKIP = "skip"
    ZERO = "zero"


class Baseline(StrEnum):
    """How a value is turned into an advantage within its group of n values.

    `grpo`: A_i = (r_i - mean(r)) / (std(r) + 1e-6), where std divides by n - 1 (Bessel's correction); Shao et al.
    2024, "DeepSeekMath", section 4.1.2. `leave_one_out`: A_i = r_i - mean(r_j for j != i); Ahmadian et al. 2024, "Back
    to Basics" (RLOO), equation 8. The same formulas compare steps of equal state: Feng et al. 2025, "Group-in-Group
    Policy Optimization" (GiGPO), section 3.2.
    """

    GRPO = "grpo"
    LEAVE_ONE_OUT = "leave_one_out"


class TurnCredit(StrEnum):
    """How each turn gets an advantage of its own, over forks and, with `credit: lineage`, over conversations.

    `gigpo`: A_E + w * A_S, the advantage of the sample's score in its group and that of the turn's return among the
    turns of equal state, w = `step_weight`; Feng et al. 2025, "Group-in-Group Policy Optimization" (arXiv 2505.10978),
    equation 8. `process`: the return of the turn, where each reward r is replaced by its advantage among all rewards of
    turns in the group; Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), section 4.1.3, with `discount` 1. Both
    compare by the formula that `advantages` names, else `grpo`.
    """

    GIGPO = "gigpo"
    PROCESS = "process"


class TurnSelection(StrEnum):
    """`all` turns, or only the `last` ones: those that no turn continues."""

    ALL = "all"
    LAST = "last"


class TrainedLogprobs(StrEnum):
    """Turns are trained whatever distribution their logprobs are of, or only those with logprobs by the rule."""

    ANY = "any"
    RULE = "rule"


class Stale(StrEnum):
    """What happens to tokens older than `min_version`: the samples that would train them are dropped, or the tokens are
    masked."""

    DROP = "drop"
    MASK = "mask"


class TooLong(StrEnum):
    """What to do with a sample longer than the padded lengths: refuse the export, drop the sample, or truncate it."""

    REFUSE = "refuse"
    DROP = "drop"
    TRUNCATE = "truncate"


class Merge(StrEnum):
    """The samples that may share tokens: those of a group, or all samples of a page."""

    GROUP = "group"
    ALL = "all"


class Experts(StrEnum):
    """The experts of a token that samples share: those of the first sample that recorded them; or only tokens with
    equal experts are shared."""

    FIRST = "first"
    EQUAL = "equal"


class Keep(StrEnum):
    """The part of a truncated response to keep: its first, last or middle tokens."""

    HEAD = "head"
    TAIL = "tail"
    MIDDLE = "middle"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSelection:
    """What to train; the rest stays in the samples as context.

    `turns` may be indexes, which count the turns of a conversation from its root, 0. `purposes` and `agents`: None
    selects all. `constrained`: answers that were sampled under a grammar have the logprobs of the masked distribution.
    """

    turns: TurnSelection | frozenset[int] = option(
        TurnSelection.ALL,
        "Turns to train: all, the last ones, or indexes from 0 of a conversation.",
        panel=TRAIN,
        flag="train_turns",
    )
    purposes: frozenset[Purpose] | None = option(
        None, "Train only turns of these purposes.", panel=TRAIN, flag="train_purpose"
    )
    agents: frozenset[str] | None = option(None, "Train only turns of these agents.", panel=TRAIN, flag="train_agent")
    exclude: frozenset[str] = option(frozenset(), "Do not train the interactions with these ids.", panel=TRAIN)
    constrained: bool = option(
        False,
        "Also train what was sampled under a grammar: forced tool calls and JSON answers.",
        panel=TRAIN,
        flag="train_constrained",
        note="[Sampled under a grammar](trajectories.md#what-is-not-trained).",
    )
    logprobs: TrainedLogprobs = option(
        TrainedLogprobs.ANY,
        "Turns to train by their `logprobs_of`: any, or only those whose logprobs are by the rule.",
        panel=TRAIN,
        flag="train_logprobs",
        note="[Logprobs of vLLM](train.md#logprobs-of-vllm).",
    )
    max_segments: int | None = option(
        None,
        "Train only the newest conversations of each lineage, at most this many.",
        least=1,
        panel=TRAIN,
        flag="train_max_segments",
        otherwise="all",
        note="[Lineage](concepts.md#lineage).",
    )


EVERYTHING = TrainSelection()


@dataclass(frozen=True)
class Padding:
    """The options of layout padded; lengths are in tokens. A truncated prompt keeps its end."""

    prompt_length: int = option(
        0,
        "Length of prompts, padded on the left. Layout padded needs it.",
        unit="tokens",
        least=1,
        most=_MAX_LENGTH,
        panel=PADDED,
        otherwise="",
        tokens=True,
    )
    response_length: int = option(
        0,
        "Length of responses, padded on the right. Layout padded needs it.",
        unit="tokens",
        least=1,
        most=_MAX_LENGTH,
        panel=PADDED,
        otherwise="",
        tokens=True,
    )
    pad_token_id: int = option(0, "Token id of the padding.", least=0, panel=PADDED)
    on_too_long: TooLong = option(
        TooLong.REFUSE,
        "What to do with samples that do not fit, also in layout forest, which cannot truncate them.",
        panel=PADDED,
        tokens=True,
    )
    keep: Keep = option(Keep.HEAD, "Part of a truncated response to keep.", panel=PADDED, tokens=True)


@dataclass(frozen=True)
class Forest:
    """The options of layout forest."""

    max_tokens: int | None = option(
        None,
        "Most tokens of a sequence. Several groups are packed into one; a group that does not fit becomes several, "
        "which repeat context.",
        unit="tokens",
        least=1,
        most=_MAX_LENGTH,
        panel=FOREST,
        otherwise="one sequence per group",
        tokens=True,
    )
    merge: Merge = option(Merge.GROUP, "Which samples may share tokens.", panel=FOREST)
    experts: Experts = option(Experts.FIRST, "The experts of tokens that samples share.", panel=FOREST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A model whose logprobs of the trained tokens samples have, as `NAME_logprobs` and, with `top_k`,
    `NAME_top_token_ids` and `NAME_top_logprobs`.
    """

    name: str = option("teacher", "The beginning of the names of its columns: `teacher_logprobs`.")
    model: str | None = option(
        None, "A name of the table of models; `policy@7` is an adapter version.", otherwise="the server's own engine"
    )
    top_k: int = option(0, "The number of likeliest tokens at each position.", least=0, most=20)
    temperature: float = option(1.0, "The logits are divided by it.", least=1e-3, most=100.0)
    metadata: Conditions | None = option(
        None,
        "Only for sessions with this metadata. Of the teachers of one name, the first that fits scores a session.",
    )


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How samples are made."""

    layout: Layout = option(
        Layout.CONCAT,
        "How a session becomes samples.",
        panel=SAMPLES,
        tokens=True,
        note="[Layouts](concepts.md#layouts). `traj` and `step` are other names of concat and individual.",
    )
    discount: float | None = option(
        None, "Discount of the returns.", least=0.0, most=1.0, panel=SAMPLES, otherwise="the session's"
    )
    credit: Credit | None = option(
        None, "How rewards flow back to earlier turns.", panel=SAMPLES, otherwise="the session's"
    )
    drift: Drift = option(
        Drift.FORK,
        "How to export turns that cannot be joined to their parents: in a new sample, or in the same one, which trains "
        "only answers that are still there as sampled.",
        panel=SAMPLES,
        tokens=True,
    )
    train: TrainSelection = option(EVERYTHING, "What to train; the rest stays as context.", tokens=True)
    include: frozenset[Include] = option(frozenset(), "Also include the messages or the text of turns.", panel=SAMPLES)
    images: Images = option(
        Images.REFERENCES,
        "What samples have of images: where they stand, also their bytes (each once a page), or nothing.",
        panel=SAMPLES,
        note="[Images](trajectories.md#images).",
    )
    multi_modal_inputs: bool | Literal["auto"] = option(
        False,
        "Also what the model's processor made of images, and the positions of vision models; auto: if the model is "
        "one.",
        panel=SAMPLES,
        note="[What the processor made](trajectories.md#what-the-processor-made-of-images).",
    )
    replay: frozenset[Replay] | None = option(
        None,
        "Recorded columns that samples have: kept sets, routed experts, alternatives.",
        panel=SAMPLES,
        otherwise="all that were recorded; none in json, jsonl and areal",
        note="[Replay columns](replay.md).",
    )
    teachers: tuple[Teacher, ...] = option(
        (),
        "Models that score the trained tokens: the logprobs of each are columns of the samples.",
        panel=SAMPLES,
        flag="teacher",
        note="[Teachers](trajectories.md#teachers).",
    )
    reward_name: str | None = option(
        None,
        "Name of the reward that counts.",
        panel=SAMPLES,
        otherwise="the unnamed one",
        tokens=True,
        note="[Which reward counts](trajectories.md#which-reward-counts).",
    )
    reward_granularity: Granularity | None = option(
        None, "As in ROLL: the metric of that name is the reward, else the score.", panel=SAMPLES, tokens=True
    )
    reward_scope: RewardScope | None = option(
        None,
        "Which rewards are summed into a sample's reward.",
        panel=SAMPLES,
        otherwise="that of the session's start, else by its score and tree; path with format areal or style",
        tokens=True,
        note="session: every sample has the session's score; path: the sum along its own path; agent: the sum of its "
        "agent's turns, compared with the same agent's. [Rewards](concepts.md#rewards), "
        "[the score of a session](concepts.md#the-score-of-a-session), "
        "[several agents](concepts.md#several-agents-in-one-episode).",
    )
    unrewarded: Unrewarded | None = option(
        None,
        "What happens to sessions that run, failed or have no reward: they are left out, or count with the rewards "
        "they have, else as 0.",
        panel=SAMPLES,
        otherwise="skip with advantages, else zero",
        tokens=True,
    )
    mask_unfinished: bool = option(
        False, "Train nothing of sessions that ended with `finished: false`.", panel=TRAIN, tokens=True
    )
    stale: Stale = option(
        Stale.DROP,
        "What to do with tokens older than `filter.min_version`: drop the samples that would train them, or mask only "
        "these tokens.",
        panel=SESSIONS,
        tokens=True,
        note="[Stale tokens](trajectories.md#stale-tokens).",
    )
    advantages: Baseline | None = option(None, "Add a column of advantages within each group.", panel=SAMPLES)
    step_advantages: Baseline | None = option(
        None, "Add a column of advantages among the turns of a group with the same `state_hash`.", panel=SAMPLES
    )
    turn_advantages: TurnCredit | None = option(
        None,
        "Add a column with an advantage of each turn: gigpo, from its sample and its state; process, from rewards of "
        "turns.",
        panel=SAMPLES,
        note="[Advantages of turns](concepts.md#advantages-of-turns).",
    )
    step_weight: float = option(
        1.0, "The weight of the state's advantage in `turn_advantages`: gigpo.", least=0.0, most=1e6, panel=SAMPLES
    )


@dataclass(frozen=True, kw_only=True)
class FormatOptions:
    """How samples are encoded."""

    format: ExportFormat = option(
        ExportFormat.JSON,
        "Format of the samples.",
        panel=SAMPLES,
        otherwise="json; for `tokengrove export` as the file is named, or jsonl in a folder",
    )
    style: Layout | None = option(None, "AReaL's name of `layout`; without `format` the format is areal.")


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """Which sessions an export has, and how many an answer."""

    session_id: str | None = option(None, "Only this session.")
    session_ids: tuple[str, ...] | None = option(
        None, "Only these sessions, archived ones included.", panel=SESSIONS, flag="session"
    )
    filter: SessionFilter = option(
        SessionFilter(), "Which sessions, turns and samples.", note="[Filters](#filters).", tokens=True
    )
    route: frozenset[str] | None = option(
        None,
        "Only turns of these routes.",
        panel=SAMPLES,
        otherwise="the trained ones",
        tokens=True,
        note="[Routes in exports](models.md#what-is-recorded-and-exported).",
    )
    wait_s: float = option(
        0.0,
        "Wait until the named sessions have ended.",
        unit="seconds",
        least=0.0,
        most=600.0,
        panel=SESSIONS,
    )
    limit: int = option(
        1000,
        "Sessions per page, or per file of a folder.",
        least=1,
        most=1000,
        panel=SAMPLES,
        flag="page_size",
        otherwise="1000; for `tokengrove export` 100",
    )
    cursor: str | None = option(None, "The `cursor` of the page before.")
    outline: bool = option(
        False,
        "Samples have [runs of tokens](trajectories.md#outlines) instead of arrays, for people to look at; formats "
        "json and jsonl only.",
    )
    drop_retry_orphans: bool | None = option(
        None,
        "AReaL's field, without effect: what a retry replaced is [never sampled twice](concepts.md#retries), and never "
        "exported.",
    )


SAMPLE_GROUPS = (SampleOptions, Padding, Forest, FormatOptions)
"""What an export and the export of a claim have in common."""
EXPORT_GROUPS = (PageOptions, *SAMPLE_GROUPS)
"""All options of an export."""
