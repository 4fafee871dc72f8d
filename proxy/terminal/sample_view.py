"""The samples of a session for a terminal: what each contains, what it trains, and what no sample trains, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from proxy.client import Export, Sample
from proxy.terminal import figures
from proxy.terminal.sample_parts import SamplePart, parts_of
from proxy.trajectory.recomputable import Unrecomputable
from proxy.trajectory.untrained import LeftOut, Untrained
from proxy.tree_view import printable


def sample_view(export: Export, session_id: str, numbers: Mapping[str, int | None]) -> RenderableType:
    """The samples of one session. `numbers`: of its turns, by interaction id."""
    entry = export.sessions[session_id]
    return Group(*_lines(export, entry, numbers))


def _lines(export: Export, entry: Mapping[str, Any], numbers: Mapping[str, int | None]) -> Iterator[Text]:
    for index, sample in enumerate(export.samples):
        yield _heading(index, len(export.samples), sample, numbers)
        yield Text("  ").append_text(_parts(sample, numbers))
        if sample.recomputable is not None:
            yield Text(f"  its logprobs cannot be computed again: they {_meaning(Unrecomputable, sample.recomputable)}")
    if not export.samples:
        yield Text("no samples")
    trained, sampled = entry["trained_tokens"], entry["sampled_tokens"]
    yield Text(f"{trained} of {sampled} sampled tokens are trained", "bold")
    for reason, tokens in entry["untrained_tokens"].items():
        yield Text(f"  {tokens} not: the token {_meaning(Untrained, reason)} ({reason})", "yellow")
    if entry.get("left_out") is not None:
        yield Text(f"the session is left out: it {_meaning(LeftOut, entry['left_out'])}", "yellow")
    for warning in entry["warnings"]:
        yield Text(printable(f"warning: {warning}"), "yellow")


def _heading(index: int, count: int, sample: Sample, numbers: Mapping[str, int | None]) -> Text:
    turns = " → ".join(str(numbers.get(name, figures.NONE)) for name in sample.interaction_ids)
    named = "turn" if len(sample.interaction_ids) == 1 else "turns"
    told = [f"{len(sample.input_ids)} tokens", f"{int(sample.loss_mask.sum())} trained"]
    told += [f"reward {figures.number(sample.reward)}", f"weight {figures.number(sample.weight)}"]
    if sample.purpose not in (None, "main"):
        told.append(f"purpose {sample.purpose}")
    if sample.agent is not None:
        told.append(f"agent {sample.agent}")
    of = printable(f", {named} {turns}: {', '.join(told)}")
    return Text.assemble((f"sample {index + 1} of {count}", "bold"), of)


def _parts(sample: Sample, numbers: Mapping[str, int | None]) -> Text:
    return Text(" | ", "dim").join(_part(part) for part in parts_of(sample, numbers))


def _part(part: SamplePart) -> Text:
    """A stretch: context plainly, what is trained in capital letters, since colour alone may not be seen."""
    if not part.sampled:
        return Text(f"{part.tokens} prompt")
    if not part.trained:
        return Text(f"{part.tokens} context", "dim")
    number = str(part.tokens) if part.trained == part.tokens else f"{part.trained} of {part.tokens}"
    return Text(f"{number} TRAINED", "green")


def _meaning(kind: Any, word: str) -> str:
    return next((each.meaning for each in kind if each.value == word), word)  # a newer server may have others
