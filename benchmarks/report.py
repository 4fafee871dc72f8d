"""The results as Markdown tables and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

BARE = "pass-through"
Results = Mapping[str, Any]
_WIDTH, _BAR, _LABEL, _ROW = 760, 440, 170, 22


def write_report(results: Results, folder: Path) -> str:
    """Write `results.md` and `results.svg`, and return the text of the former."""
    text = markdown(results)
    (folder / "results.md").write_text(text, encoding="utf-8")
    (folder / "results.svg").write_text(picture(results), encoding="utf-8")
    return text


def markdown(results: Results) -> str:
    """Return all tables."""
    found = _measured(results)
    parts = [_head(results), _costs(found), "Exactness:", _exactness(found, "exactness")]
    parts += ["Exactness with screenshots:", _exactness(found, "images"), "`kill -9`:", _kills(found)]
    if left_out := {name: one["left_out"] for name, one in results["gateways"].items() if "left_out" in one}:
        parts.append("\n".join(f"- {name} is left out. {why.splitlines()[0]}" for name, why in left_out.items()))
    return "\n\n".join(parts) + "\n"


def _measured(results: Results) -> dict[str, Any]:
    return {name: one for name, one in results["gateways"].items() if "figures" in one}


def _head(results: Results) -> str:
    machine = results["machine"]
    cores = f"{machine['cores']} cores (load before: {machine['load_before']})"
    place = f"{results['date']}, {machine['cpu']}, {cores}, Python {machine['python']}, {results['took_s']} s"
    place += f" ({results['cpu_s']} s of CPU)"
    return f"{place}: `{' '.join(['python -m benchmarks', results['command']]).strip()}`"


def _costs(found: Mapping[str, Any]) -> str:
    columns = ["gateway", "version", "CPU ms a turn", "to pass-through", "turns a CPU s", "CPU us a token"]
    columns += ["tokens a CPU s", "added ms a turn, p50", "p99", "added ms a token, p50", "p99"]
    columns += ["RSS MB", "MB per 1,000 sessions"]
    bare = found[BARE]["figures"]["turns"]["cpu_ms"] if BARE in found else None
    rows = []
    for name, one in found.items():
        figures = one["figures"]
        row = [name, one["version"] or "-"]
        if turns := figures.get("turns"):
            ratio = f"{turns['cpu_ms'] / bare:.1f}" if bare else "-"
            row += [f"{turns['cpu_ms']:.2f}", ratio, f"{turns['a_core']:.0f}"]
        else:
            row += ["-"] * 3
        streams, latency = figures.get("streams"), figures["latency"]
        row += [f"{streams['cpu_us']:.0f}", f"{streams['a_core']:.0f}"] if streams else ["-"] * 2
        row += [f"{latency['p50_ms']:.1f}", f"{latency['p99_ms']:.1f}"]
        row += [f"{streams['p50_ms']:.1f}", f"{streams['p99_ms']:.1f}"] if streams else ["-"] * 2
        memory = figures.get("memory")
        row += [f"{figures['rss_idle_mb']:.0f}", f"{memory['mb_per_1000']:.0f}"] if memory else ["-"] * 2
        rows.append(row)
    return _table(columns, rows, left=2)


def _exactness(found: Mapping[str, Any], phase: str) -> str:
    """Return the table of the exactness in a phase: `exactness`, or `images`."""
    columns = ["gateway", "sampled tokens", "exact", "wrong", "lost", "twice", "behind another prompt", "samples"]
    columns += ["tokens a sampled token", "later turns re-tokenised"]
    rows = []
    for name, one in found.items():
        if (exact := one["figures"].get(phase)) is None:
            continue
        if "failed" in exact:
            rows.append([name, exact["failed"].splitlines()[0][:80], *["-"] * 8])
            continue
        broken = f"{exact['broken_turns']} of {exact['continuing_turns']}"
        if "no_tokens" in exact:
            rows.append([name, "no tokens", *["-"] * 7, broken])
            continue
        read = f"{exact['sample_tokens'] / exact['sampled']:.1f}"
        counts = [exact[key] for key in ("sampled", "exact", "wrong", "lost", "twice", "moved", "samples")]
        rows.append([name, *(f"{count:,}" for count in counts), read, broken])
    return _table(columns, rows)


def _kills(found: Mapping[str, Any]) -> str:
    columns = ["gateway", "read before the kill", "of these lost", "tokens lost", "trained twice at the end"]
    columns += ["answers lost at the end", "sessions that could not go on", "s until it serves"]
    rows = []
    for name, one in found.items():
        if (kill := one["figures"].get("kill")) is None:
            continue
        row = [name, str(kill["seen_before"])]
        if "no_tokens" in kill:
            row += ["no tokens", *["-"] * 3]
        else:
            row += [str(kill["lost_answers"]), str(kill["lost_tokens"]), str(kill["of_all"]["twice"])]
            row.append(f"{kill['of_all']['lost_turns']} of {kill['of_all']['turns']}")
        rows.append([*row, f"{kill['failed_sessions']} of {kill['sessions']}", f"{kill['restart_s']:.1f}"])
    return _table(columns, rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    rule = ["---"] * left + ["---:"] * (len(columns) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows))


def picture(results: Results) -> str:
    """Return an SVG with bars: CPU time of a turn and of a token, memory, and tokens that a trainer reads."""
    found = {name: one["figures"] for name, one in _measured(results).items() if "turns" in one["figures"]}
    panels: list[tuple[str, Callable[[Any], float | None]]] = [
        ("CPU ms a turn", lambda one: one["turns"]["cpu_ms"]),
        ("CPU us a streamed token", lambda one: one["streams"] and one["streams"]["cpu_us"]),
        ("MB per 1,000 sessions", lambda one: one["memory"]["mb_per_1000"]),
        ("tokens that a trainer reads for a sampled token", _read),
    ]
    lines, top = list[str](), 10
    for title, value in panels:
        lines += _panel(title, {name: value(one) for name, one in found.items()}, top)
        top += _ROW * (len(found) + 2)
    size = f'width="{_WIDTH}" height="{top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">'
    return "\n".join([head, f'<rect {size} fill="#ffffff"/>', *lines, "</svg>"]) + "\n"


def _read(figures: Any) -> float | None:
    exact = figures["exactness"]
    return None if "no_tokens" in exact else exact["sample_tokens"] / exact["sampled"]


def _panel(title: str, values: Mapping[str, float | None], top: int) -> Iterator[str]:
    most = max((value for value in values.values() if value), default=1.0)
    yield f'<text x="10" y="{top + 15}" font-weight="bold" fill="#1a1a1a">{escape(title)}</text>'
    for row, (name, value) in enumerate(values.items(), 1):
        y = top + row * _ROW
        yield f'<text x="{_LABEL}" y="{y + 15}" text-anchor="end" fill="#1a1a1a">{escape(name)}</text>'
        if value is None:
            yield f'<text x="{_LABEL + 10}" y="{y + 15}" fill="#6b6b6b">none</text>'
            continue
        width = max(1.0, _BAR * max(value, 0.0) / most)
        yield f'<rect x="{_LABEL + 10}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 7}" fill="#2f6f9f"/>'
        yield f'<text x="{_LABEL + 16 + width:.1f}" y="{y + 15}" fill="#1a1a1a">{value:,.{_digits(value)}f}</text>'


def _digits(value: float) -> int:
    return 0 if value >= 100 else 1 if value >= 10 else 2
