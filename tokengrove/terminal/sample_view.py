"""The samples of a session for a terminal: their contents, their trained tokens, and the tokens that none trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group
from rich.text import Text

from tokengrove.reasons import LeftOut, Unrecomputable, Untrained
from tokengrove.terminal import figures
from tokengrove.texts import printable

Outline = Mapping[str, Any]
"""A sample of an export with `outline`."""

_STYLES = {"trained": "green", "sampled": "yellow", "prompt": "", "context": "dim", "padding": "dim"}


def sample_view(outline: Mapping[str, Any], numbers: Mapping[str, int | None]) -> Group:
    """The samples of an export of one session. `numbers`: the numbers of its turns, by interaction id."""
    [entry] = outline["sessions"]
    return Group(*_lines(outline["samples"], entry, numbers))


def _lines(samples: list[Outline], entry: Mapping[str, Any], numbers: Mapping[str, int | None]) -> Iterator[Text]:
    for index, sample in enumerate(samples):
        yield _heading(index, len(samples), sample, numbers)
        yield Text("  ").append_text(_runs(sample))
        if sample["recomputable"] is not None:
            yield Text(
                f"  its logprobs cannot be computed again: they {_meaning(Unrecomputable, sample['recomputable'])}"
            )
    if not samples:
        yield Text("no samples")
    yield Text(f"{entry['trained_tokens']} of {entry['sampled_tokens']} sampled tokens are trained", "bold")
    for reason, tokens in entry["untrained_tokens"].items():
        yield Text(f"  {tokens} not: the token {_meaning(Untrained, reason)} ({reason})", "yellow")
    if entry["left_out"] is not None:
        yield Text(f"the session is left out: it {_meaning(LeftOut, entry['left_out'])}", "yellow")
    for warning in entry["warnings"]:
        yield Text(printable(f"warning: {warning}"), "yellow")


def _heading(index: int, count: int, sample: Outline, numbers: Mapping[str, int | None]) -> Text:
    turns = " → ".join(str(numbers.get(name, figures.NONE)) for name in sample["interaction_ids"])
    trained = sum(end - start for start, end, kind, _ in sample["runs"] if kind == "trained")
    told = [f"{sample['tokens']} tokens", f"{trained} trained"]
    told += [f"{name} {figures.number(sample[column][0])}" for name, column in _COLUMNS.items()]
    if sample["purpose"] not in (None, "main"):
        told.append(f"purpose {sample['purpose']}")
    if sample["agent"] is not None:
        told.append(f"agent {sample['agent']}")
    if sample.get("route"):
        told.append(f"route {sample['route']}")
    named = "turn" if len(sample["interaction_ids"]) == 1 else "turns"
    of = printable(f", {named} {turns}: {', '.join(told)}")
    return Text.assemble((f"sample {index + 1} of {count}", "bold"), of)


_COLUMNS = {"reward": "rewards", "weight": "weight"}


def _runs(sample: Outline) -> Text:
    """The runs of tokens of a sample. TRAINED is in capital letters, because colour may not be visible."""
    return Text(" | ", "dim").join(
        Text(f"{end - start} {'TRAINED' if kind == 'trained' else kind}", _STYLES.get(kind, ""))
        for start, end, kind, _ in sample["runs"]
    )


def _meaning(kind: Any, word: str) -> str:
    return next((each.meaning for each in kind if each.value == word), word)  # a newer server may have other words
