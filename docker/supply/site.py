"""Builds the documentation site from the documents as they are, and fails at a link that leads nowhere.

    pip install -r docs/requirements.txt
    PYTHONPATH=docker python -m supply.site FOLDER   # new or empty; FOLDER/index.html is the README

The site has the README and all that links lead to from there, at the paths of the repository, so links stay as they are
written: a page is a page, a file is a page that shows it, a folder is a page that lists its files. The navigation is
that of docs/index.md. The reference of `API` is read from docstrings.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
HOME, INDEX = PurePosixPath("README.md"), PurePosixPath("docs/index.md")
# The public modules: those that the documents import from.
API = (
    *("tokengrove", "tokengrove.errors", "tokengrove.client.forest", "tokengrove.client.kept_sets"),
    *("tokengrove.runs", "tokengrove.rollout.episodes", "tokengrove.rollout.episodes.play"),
    *("tokengrove.rollout.team", "tokengrove.rollout.scorers"),
    *("tokengrove.rollout.harbor", "tokengrove.rollout.sandboxes", "tokengrove.rollout.session_start"),
    *("tokengrove.areal", "tokengrove.openenv", "tokengrove.rollout.contract", "tokengrove.roll"),
    *("tokengrove.roll.rock", "tokengrove.trl", "tokengrove.verl"),
    *(
        f"tokengrove.client.adapters.{trainer}"
        for trainer in (
            *("areal", "art", "huggingface", "miles", "nemo_rl", "openenv", "prime_rl", "replay", "roll", "skyrl"),
            *("slime", "trl", "trl_rollout", "verifiers", "verl"),
        )
    ),
    *("tokengrove.engine", "tokengrove.testing"),
)
# Every error has the attributes of the first: they are not repeated.
_OPTIONS = {"tokengrove.errors": "    options:\n      inherited_members: false\n"}
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
_DIRECTIVE = re.compile(r"\s*<!--.*-->\s*")  # of tests/docs/pages.py and supply.option_tables
_FENCE = re.compile(r"\s*(`{3,})")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".conf": "nginx", ".toml": "toml", ".sh": "bash"}
_COLOUR = re.compile(r"\x1b\[[\d;]*m")  # zensical has no switch for it
_IMAGES = (".png", ".svg")


class Broken(Exception):
    """The documents cannot be a site; the text names the page."""


@dataclass(slots=True)
class Pages:
    """The pages of the site: their Markdown by path. `images`: files that they show."""

    root: Path
    texts: dict[PurePosixPath, str] = field(default_factory=dict)
    images: set[PurePosixPath] = field(default_factory=set)

    def add(self, path: PurePosixPath) -> None:
        """Add a document and all that its links lead to. Raises Broken for a link to nothing."""
        if path in self.texts:
            return
        text = (self.root / path).read_text(encoding="utf-8")
        self.texts[path] = ""  # known from here on: links may lead in circles
        self.texts[path] = outside_of_code(text, lambda line: _LINK.sub(lambda link: self._followed(path, link), line))

    def _followed(self, page: PurePosixPath, link: re.Match[str]) -> str:
        opening, target, rest = link.groups()
        if re.match(r"[a-z]+:", target):
            return link[0]
        path = normal(page.parent / target)
        place = self.root / path
        if not place.exists():
            raise Broken(f"{page} links to {target}, which is not there")
        if path.suffix in _IMAGES:
            self.images.add(path)
        elif path.suffix == ".md":
            self.add(path)
        elif place.is_dir():
            self._list(path)
            target = f"{target.rstrip('/')}/index.md"
        else:
            self._show(path)
            target += ".md"
        return f"{opening}{target}{rest}"

    def _show(self, path: PurePosixPath) -> None:
        """Add a page that shows a file."""
        text = (self.root / path).read_text(encoding="utf-8")
        fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 3)
        code = f"{fence}{_LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n{fence}"
        self.texts[path.with_name(f"{path.name}.md")] = f"# {path}\n\n{code}\n"

    def _list(self, path: PurePosixPath) -> None:
        """Add a page that lists the Python files of a folder, with the first line of each."""
        lines = [f"# {path}\n\n"]
        for file in sorted((self.root / path).glob("*.py")):
            self._show(path / file.name)
            about = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            lines.append(f"- [{file.name}]({file.name}.md): {about.partition(chr(10))[0]}\n")
        self.texts[path / "index.md"] = "".join(lines)

    def write(self, folder: Path) -> None:
        for path, text in self.texts.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        shutil.copytree(self.root / "docs" / "images", folder / "docs" / "images")
        for path in self.images:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.root / path, folder / path)


def outside_of_code(text: str, change: Callable[[str], str]) -> str:
    """Change the lines of a document that are not in a code block, and leave out those that are comments."""
    return "".join(_lines(text.splitlines(keepends=True), change))


def _lines(lines: list[str], change: Callable[[str], str]) -> Iterator[str]:
    ticks: str | None = None
    for line in lines:
        fence = _FENCE.match(line)
        if ticks is not None:
            if line.strip() == ticks:
                ticks = None
            yield line
        elif fence is not None:
            ticks = fence[1]
            yield line
        elif not _DIRECTIVE.fullmatch(line):
            yield change(line)


def normal(path: PurePosixPath) -> PurePosixPath:
    """A path without `..`, which may lead out of the repository."""
    return PurePosixPath(os.path.normpath(path))


def sections(pages: Pages) -> list[tuple[str, list[tuple[str, PurePosixPath]]]]:
    """The sections of docs/index.md with their pages, each by its first link: (heading, [(text of the link, page)]).

    A text has a capital, unless the heading of its page has the text as it is.
    """
    found: list[tuple[str, list[tuple[str, PurePosixPath]]]] = []
    seen = {HOME, INDEX}
    for part in re.split(r"^## ", pages.texts[INDEX], flags=re.MULTILINE)[1:]:
        listed = []
        for text, target in re.findall(r"\[([^\]]+)\]\(([^)#\s:]+\.md)(?:#[^)]*)?\)", part):
            path = normal(INDEX.parent / target)
            if path not in seen:
                seen.add(path)
                listed.append(
                    (text if text in pages.texts[path].partition("\n")[0] else text[0].upper() + text[1:], path)
                )
        if listed:
            found.append((part.partition("\n")[0], listed))
    return found


def navigation(pages: Pages, reference: dict[PurePosixPath, str]) -> str:
    """The navigation as TOML: the README, the index and its sections in their order, the reference, and the rest."""
    index = sections(pages)
    entries = [_entry("Tokengrove", HOME), _entry("All pages", INDEX)]
    entries += [_section(heading, [_entry(*page) for page in listed]) for heading, listed in index]
    entries.append(_section("Python API", [_entry(path.stem.removeprefix("tokengrove."), path) for path in reference]))
    named = {HOME, INDEX, *(path for _, listed in index for _, path in listed)}
    rest = [path for path in sorted(pages.texts) if path not in named]
    entries.append(_section("Files", [_entry(str(path).removesuffix(".md"), path) for path in rest]))
    return f"nav = [{', '.join(entries)}]\n"


def _entry(title: str, path: PurePosixPath) -> str:
    return f"{{ {json.dumps(title)} = {json.dumps(str(path))} }}"


def _section(title: str, entries: list[str]) -> str:
    return f"{{ {json.dumps(title)} = [{', '.join(entries)}] }}"


def write_source(root: Path, folder: Path) -> None:
    """Write the source of the site, for zensical, to a folder: zensical.toml and `pages`. Raises Broken."""
    pages = Pages(root)
    pages.add(HOME)
    reference = {
        PurePosixPath(f"api/{module}.md"): f"# {module}\n\n::: {module}\n{_OPTIONS.get(module, '')}" for module in API
    }
    head = '[project]\ndocs_dir = "pages"\nsite_dir = "site"\n'
    configuration = (root / "docs" / "zensical.toml").read_text(encoding="utf-8")
    python = f"[project.plugins.mkdocstrings.handlers.python]\npaths = [{json.dumps(str(root))}]\n"
    configuration = configuration.replace("[project]\n", head + navigation(pages, reference), 1)
    configuration = configuration.replace(f"{python.splitlines()[0]}\n", python, 1)
    (folder / "zensical.toml").write_text(configuration, encoding="utf-8")
    pages.texts |= reference
    pages.write(folder / "pages")


def build(root: Path, site: Path) -> None:
    """Build the site in a new or empty folder. Raises Broken, with what zensical says."""
    if site.exists() and any(site.iterdir()):
        raise Broken(f"{site} is not empty")
    with tempfile.TemporaryDirectory() as folder:
        write_source(root, Path(folder))
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
        said = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if said.returncode:
            raise Broken(_COLOUR.sub("", f"zensical: {said.stdout}{said.stderr}"))
        shutil.copytree(Path(folder) / "site", site, dirs_exist_ok=True)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: PYTHONPATH=docker python -m supply.site FOLDER")
    try:
        build(ROOT, Path(sys.argv[1]).absolute())
    except Broken as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
