"""The code blocks of the documents: what each is, and whether a test runs it.

A block in `bash` or `python` is run. A block in `json` is the reply to the bash block before it. A block in `text` or
`mermaid` is output or a drawing. An HTML comment on the line before the fence says otherwise:

<!-- not run: REASON -->     the block cannot run here; its syntax is checked
<!-- long: REASON -->        the block runs only in `.ci/run`
<!-- needs: MODULE -->       the block runs only where this module is installed
<!-- file: NAME -->          the block is saved under this name in the folder of the page
<!-- continues -->           the python block is run behind the python block before it, as one script
<!-- fails: REASON -->       the command is meant to fail
<!-- prints -->              the text block is exactly what the block before it prints
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
RUN, OUTPUT, CHECKED = ("bash", "python"), ("text", "mermaid"), ("json", "yaml", "toml", "ini", "nginx", "dockerfile")
DIRECTIVES = ("not run", "long", "needs", "file", "continues", "fails", "prints")
_NEEDS_ARGUMENT = ("not run", "long", "needs", "file", "fails")
_FENCE = re.compile(r"^(\s*)(`{3,})(.*)$")
_COMMENT = re.compile(r"<!--\s*([a-z ]+?)\s*(?::\s*(.*?)\s*)?-->")


class Unmarked(AssertionError):
    """A block that no test runs and that is not marked as output."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. `directive` is the comment before it, without its `argument`."""

    page: str
    line: int
    language: str
    text: str
    directive: str | None = None
    argument: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Every document whose blocks are tested."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(path: Path) -> list[Block]:
    """The blocks of a document in order. Raises Unmarked for a comment that is no directive."""
    return list(_blocks(path.name, path.read_text(encoding="utf-8").splitlines()))


def _blocks(page: str, lines: list[str]) -> Iterator[Block]:
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        at += 1
        if fence is None:
            continue
        indent, ticks, language = fence.groups()
        start, directive = at, _directive(page, lines, at - 2)
        while at < len(lines) and lines[at].strip() != ticks:
            at += 1
        text = "".join(f"{line.removeprefix(indent)}\n" for line in lines[start:at])
        at += 1
        yield Block(page, start, language.strip(), text, *directive)


def _directive(page: str, lines: list[str], at: int) -> tuple[str | None, str]:
    comment = _COMMENT.fullmatch(lines[at].strip()) if at >= 0 else None
    if comment is None:
        return None, ""
    name, argument = comment[1], comment[2] or ""
    if name not in DIRECTIVES or (name in _NEEDS_ARGUMENT) != bool(argument):
        raise Unmarked(f"{page}:{at + 1}: {lines[at].strip()} is not one of the comments in tests/docs/pages.py")
    return name, argument


def check_marked(blocks: list[Block]) -> None:
    """Raise Unmarked unless every block is run, is output, or says why it is not run."""
    for at, block in enumerate(blocks):
        if block.directive in ("not run", "file") or block.language in (*RUN, *OUTPUT):
            continue
        before = blocks[at - 1] if at else None
        follows_request = before is not None and before.language == "bash" and before.directive != "not run"
        if block.language == "json" and follows_request:
            continue
        raise Unmarked(
            f"{block.place}: a block in {block.language or 'no language'} is neither run nor marked as output; "
            "tests/docs/pages.py says how"
        )


def check_syntax(block: Block) -> None:
    """Raise AssertionError, ValueError or SyntaxError for a block that could not work anywhere."""
    match block.language:
        case "bash":
            run = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
            assert run.returncode == 0, f"{block.place}: {run.stderr}"
        case "python":
            compile(block.text, block.place, "exec")
        case "json":
            json.loads(block.text)
        case "yaml":
            list(yaml.safe_load_all(block.text))
        case "toml":
            tomllib.loads(block.text)
        case "ini":
            ConfigParser(strict=False, interpolation=None).read_string(block.text)
        case "nginx":
            assert block.text.count("{") == block.text.count("}"), f"{block.place}: braces do not match"
