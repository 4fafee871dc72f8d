"""The text of a run's progress and summary, at any width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from tokengrove.runs.summary import Summary

_GAP = "  "
_WIDEST = 100
_LONGEST_EXAMPLE = 300
_WARNINGS = 3
"""Number of the export's warnings that are shown; `summary.json` has all."""
_LONGEST_WAIT_S = 100 * 3600.0


@dataclass(frozen=True, slots=True)
class Fact:
    """A few words that stay on one line, and their style on a terminal."""

    text: str
    style: str = ""


def facts(summary: Summary, running: int) -> list[Fact]:
    """The facts about a live run: progress, failures, rewards and speed."""
    failed, left = summary.failed, max(0, summary.episodes - summary.ended - running)
    told = [
        Fact(f"{summary.ended}/{summary.episodes} episodes", "bold"),
        Fact(f"{running} running"),
        Fact(f"{left} left"),
    ]
    if failed:
        told.append(Fact(f"{failed} failed ({kinds(summary.failures)})", "red"))
    if summary.retries:
        told.append(Fact(f"{summary.retries.total()} retried ({kinds(summary.retries)})", "yellow"))
    if (mean := summary.mean_reward) is not None:
        told.append(Fact(f"mean reward {number(mean)}", "green"))
    if tokens := summary.tokens_per_s:
        told.append(Fact(f"{number(tokens)} tokens/s"))
    told.append(Fact(f"after {duration(summary.seconds)}"))
    if (wait := remaining_s(summary)) is not None:
        told.append(Fact(f"{duration(wait)} to go"))
    return told


def remaining_s(summary: Summary) -> float | None:
    """Estimated seconds until the end, at the speed of this start; None if it is unknown or nothing is left."""
    here, left = summary.ended - summary.earlier, summary.episodes - summary.ended
    if here <= 0 or left <= 0:
        return None
    return min(_LONGEST_WAIT_S, summary.seconds / here * left)


def lines(summary: Summary) -> list[tuple[str, str]]:
    """The summary of an ended run, as names and texts."""
    counted = f"{summary.done} of {summary.episodes}"
    told = [("episodes", counted + (f" ({summary.earlier} played before)" if summary.earlier else ""))]
    if summary.failed:
        told.append(("failed", f"{summary.failed}: {kinds(summary.failures)}"))
        told += [("", f"{kind}, as {_cut(text)}") for kind, text in summary.examples.items()]
    if not summary.complete:
        told.append(("not played", str(summary.episodes - summary.ended)))
    if summary.retries:
        told.append(("played again", f"{summary.retries.total()}: {kinds(summary.retries)}"))
    told += _rewards(summary)
    told += [(name, number(value)) for name, value in summary.scores.items()]
    told.append(("tokens", f"{summary.prompt_tokens} prompt, {summary.output_tokens} sampled, {summary.turns} turns"))
    told.append(("time", f"{duration(summary.seconds)}, {number(summary.tokens_per_s)} sampled tokens/s"))
    if summary.output is not None:
        told.append(("samples", summary.output + _exported(summary)))
    if summary.stopped is not None:
        told.append(("stopped", summary.stopped))
    return told


def _cut(text: str) -> str:
    """The message of a failure, shortened to a few lines; the journal has all of it."""
    return text if len(text) <= _LONGEST_EXAMPLE else f"{text[:_LONGEST_EXAMPLE]}..."


def _exported(summary: Summary) -> str:
    """The contents of the sample file, if this start has written it."""
    if (export := summary.export) is None:
        return ""
    counted = f"{export['samples']} samples of {export['sessions']} sessions, {export['trained_tokens']} trained tokens"
    return f" ({counted})" + "".join(f"\n{text}" for text in export["warnings"][:_WARNINGS])


def _rewards(summary: Summary) -> Iterator[tuple[str, str]]:
    if summary.mean_reward is None:
        yield "mean reward", "none: no episode has one"
        return
    counted = f" (of {summary.rewarded} episodes)" if summary.rewarded != summary.done else ""
    yield "mean reward", number(summary.mean_reward) + counted
    if summary.failed and (mean := summary.mean_reward_with_failures) is not None:
        yield "", f"{number(mean)} with failed episodes as 0"
    for k, value in summary.pass_at_k.items():
        yield f"pass@{k}", number(value)


def summary_text(summary: Summary) -> str:
    """The summary of an ended run, one fact per line."""
    told = lines(summary)
    width = max(len(name) for name, _ in told)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in told)


def kinds(counted: Mapping[str, int]) -> str:
    """Counts by kind, the most frequent first."""
    ordered = sorted(dict(counted).items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{kind} {count}" for kind, count in ordered if count)


def number(value: float) -> str:
    """A number with three significant digits, or whole from 100 on: 0.412, 12.3, 1234."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """A duration in its two largest units: 2h 05m, 3m 20s, 7s."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {whole % 60:02}s" if minutes else f"{whole}s"


def bar(share: float, width: int) -> Text:
    """A progress bar. `share`: the completed part, from 0 to 1."""
    cells = max(1, min(_WIDEST, width - 6))
    full = int(max(0.0, min(1.0, share)) * cells)
    return Text.assemble(("━" * full, "green"), ("─" * (cells - full), "dim"), f" {share:4.0%}", no_wrap=True)


def flowed(told: Sequence[Fact], width: int) -> Iterator[Text]:
    """Facts in as few lines as possible. A fact is never broken; one that is wider than a line is shortened."""
    line = Text(no_wrap=True, overflow="ellipsis")
    for fact in told:
        if line.plain and len(line.plain) + len(_GAP) + len(fact.text) > width:
            yield line
            line = Text(no_wrap=True, overflow="ellipsis")
        line.append(_GAP if line.plain else "")
        line.append(fact.text, fact.style)
    if line.plain:
        yield line
