"""The commands, flags and variables of `tokengrove` that the documents name are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main

from proxy.settings import Settings
from proxy.settings.variables import variable_of
from tests.docs.pages import pages
from tokengrove.commands.application import app

PAGES = [path for path in pages() if path.is_file()]
PROGRAM: Any = typer.main.get_command(app)
CONTEXT: Any = None  # groups look into no context to name their commands
HELP = {"--help"}
SETTINGS = {variable_of(field.name) for field in fields(Settings)} | {"TOKENGROVE_CONFIG"}
# Those that commands of episodes get (tokengrove/rollout/command).
COMMAND_VARIABLES = {
    f"TOKENGROVE_{name}"
    for name in (
        *("BASE_URL", "ROOT_URL", "API_KEY", "MODEL", "SESSION_ID", "TASK_ID", "SAMPLE", "SEED"),
        *("TASK_FILE", "PROMPT_FILE"),
    )
}
# Of the tests, and misspelt ones whose errors the pages show.
OTHER_VARIABLES = {
    "TOKENGROVE_ADMINKEY",
    "TOKENGROVE_DATABSE_URL",
    "TOKENGROVE_PROT",
    "TOKENGROVE_TEST_RELEASE_BEFORE",
    "TOKENGROVE_TEST_THIRD",
}

# Of curl, SGLang, vLLM, Docker and the build of Python.
OTHER_FLAGS = {
    "--cacert",
    "--disable-overlap-schedule",
    "--enable-shared",
    "--enable-trace",
    "--ipc",
    "--otlp-traces-endpoint",
    "--wait",
}

BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
SPAN = re.compile(r"`([^`\n]+)`")
# Where a command begins: a line or span, perhaps behind variables, or what runs it in the folder or container named.
BEGIN = r"(?:^\s*|[;&|'] ?|-- |/bin/|--no-deps |tokengrove |exec |ssh \S+ )(?:[A-Z_]+=\S* )*"
COMMAND = re.compile(BEGIN + r"tokengrove ((?!tokengrove )[a-z-][^\n\\;&|>)#]*)", re.M)
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
FLAG = re.compile(r"(?<!\S)--[a-z][\w-]*")


def code_of(page: Path) -> Iterator[str]:
    """The blocks in a language that has commands, and the spans."""
    text = page.read_text(encoding="utf-8")
    for _, language, block in BLOCK.findall(text):
        if language in ("bash", "ini"):
            yield block.replace("\\\n", " ")
    yield from SPAN.findall(BLOCK.sub("", text))


def commands_of(page: Path) -> Iterator[str]:
    """What stands behind `tokengrove` in each command."""
    for text in code_of(page):
        yield from (command.strip() for command in COMMAND.findall(text))


def fault_of(command: str) -> str | None:
    """The word of `command` that the program does not know."""
    known, words = PROGRAM, _own_words(command)
    while hasattr(known, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        if name not in known.list_commands(CONTEXT):
            return name
        known = known.get_command(CONTEXT, name)
    flags = HELP.union(*({*option.opts, *option.secondary_opts} for option in known.params))
    return next((flag for flag in FLAG.findall(" ".join(words)) if flag not in flags), None)


def _own_words(command: str) -> list[str]:
    """The words up to the command of another program behind `--`, without what is quoted, which may be one too."""
    return QUOTED.sub("", command).partition(" -- ")[0].removesuffix(" --").split()


def all_flags(command: Any) -> set[str]:
    own = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    names = command.list_commands(CONTEXT) if hasattr(command, "commands") else []
    return own.union(*(all_flags(command.get_command(CONTEXT, name)) for name in names))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_command_that_is_named_is_there_with_its_flags(page: Path) -> None:
    assert {command: fault for command in commands_of(page) if (fault := fault_of(command))} == {}


@pytest.mark.parametrize("page", [path for path in PAGES if path.parent.name == "docs"], ids=lambda path: path.name)
def test_every_variable_that_is_named_is_a_setting(page: Path) -> None:
    named = set(re.findall(r"\bTOKENGROVE_[A-Z][A-Z0-9_]*", page.read_text(encoding="utf-8")))
    assert named - SETTINGS - COMMAND_VARIABLES - OTHER_VARIABLES == set()


@pytest.mark.parametrize(
    "name", ["settings.md", "deployment.md", "monitoring.md", "troubleshooting.md", "limits.md", "unproven.md"]
)
def test_every_flag_in_the_text_of_an_operators_page_is_one_of_a_command(name: str) -> None:
    page = next(path for path in PAGES if path.name == name)
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    named = {flag for span in SPAN.findall(text) if span.startswith("--") for flag in FLAG.findall(span)}
    assert named - all_flags(PROGRAM) - OTHER_FLAGS == set()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("`tokengrove db audit` proves it", "audit"),
        ("```bash\nA=1 tokengrove serve --metric-key x\n```\n", "--metric-key"),
        ("   ```bash\n   runuser -u grove -- /opt/tokengrove/bin/tokengrove db prune --all\n   ```\n", "--all"),
        ("```bash\ndocker compose exec -T tokengrove tokengrove dump\n```\n", "dump"),
        ("```bash\ntokengrove serve \\\n    --engin scripted\n```\n", "--engin"),
    ],
)
def test_a_command_that_is_not_there_would_be_found(tmp_path: Path, text: str, fault: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    assert [fault_of(command) for command in commands_of(page)] == [fault]
