"""A server of scripted answers, a mailbox or engine servers starts without torch, transformers and their like."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.e2e.processes import ROOT
from tests.e2e.test_servers import Wire

HEAVY = {"torch", "transformers", "openai", "openai_harmony", "tiktoken", "renderers", "safetensors", "huggingface_hub"}
READING = {"tokenizers", "fastokens", "jinja2", "minijinja"}
QWEN3 = Path(os.environ.get("TOKENGROVE_TEST_ASSETS", ROOT.parent / "shared")) / "tokenizers" / "qwen3"


@contextlib.contextmanager
def _listed(folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Start `serve` in an interpreter that lists its imports on stderr."""
    command = [sys.executable, "-X", "importtime", "-m", "tokengrove", "serve", "--port", "0", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (folder / "imports").open("w") as listed:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=listed, text=True
        )
        with process:
            try:
                yield process
            finally:
                process.kill()


def _imported(folder: Path) -> set[str]:
    listed = (folder / "imports").read_text()
    names = re.findall(r"^import time:[^|]*\|[^|]*\| *([\w.]+)$", listed, re.MULTILINE)
    return {name.partition(".")[0] for name in names}


@pytest.fixture
def wire() -> Iterator[Wire]:
    started = Wire()
    yield started
    started.kill()


def _start(folder: Path, engine: str) -> str:
    if not QWEN3.is_dir():
        pytest.skip(f"no real Qwen3 tokenizer at {QWEN3}")
    with _listed(folder, "--engine", engine, "--tokenizer", str(QWEN3)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("  try"):
                return (folder / "imports").read_text()
    raise AssertionError((folder / "imports").read_text()[-2000:])


@pytest.mark.parametrize("engine", ["scripted", "mailbox"])
def test_no_heavy_package_is_imported_without_a_model(tmp_path: Path, engine: str) -> None:
    _start(tmp_path, engine)
    assert not _imported(tmp_path) & HEAVY
    assert _imported(tmp_path) >= READING


def test_no_heavy_package_is_imported_for_engine_servers_and_each_step_is_told(tmp_path: Path, wire: Wire) -> None:
    told = _start(tmp_path, f"{wire.url},{wire.url}/other")
    assert not _imported(tmp_path) & HEAVY
    lines = [line for line in told.splitlines() if " info    " in line]
    steps = [line for line in lines if not re.search(r" engine (server|started) | took \d+\.\d s$", line)]
    assert [step.split()[2] for step in steps] == [
        *("checking", "loading", "checking", "opening", "creating", "starting", "reached")
    ]
    assert " checking the database" in steps[0] and steps[-1].endswith(" reached 1 of 2 engine servers")


WRONG = (
    ("--engine", "scripted", "--engine-arg", "foo=1"),
    ("--engine", "scripted", "--port", "99999"),
    ("--engine", "http://user:key@host"),
    ("--engine", "ftp://host:1"),
    ("--engine", "http://127.0.0.1:1", "--engine-arg", "kind=other"),
    ("--engine", "mailbox", "--engine-arg", "foo=1"),
    ("--engine", "warp"),
    ("--engine", "scripted", "--model", "nowhere"),
    ("--engine", "scripted", "--tokenizer", "nowhere"),
    ("--engine", "scripted", "--tokenizer", ".", "--family", "none-such"),
    ("--engine", "scripted", "--tokenizer", ".", "--tool-parser", "none-such"),
    ("--engine", "scripted", "--tokenizer", ".", "--reasoning-parser", "none-such"),
    ("--engine", "scripted", "--tokenizer", "whole", "--database-url", "mysql://host/base"),
    ("--engine", "scripted", "--tokenizer", "whole", "--database-url", "sqlite:///missing/base.db"),
    ("--engine", "scripted", "--tokenizer", "whole", "--database-url", "sqlite:///whole"),
    ("--engine", "scripted", "--tokenizer", "whole", "--database-url", "sqlite:///other.db"),
    ("--engine", "scripted", "--tokenizer", "whole", "--database-url", "sqlite:///newer.db"),
    ("--engine", "scripted", "--tokenizer", "whole", "--migrate", "--database-url", "postgresql://127.0.0.1:1/base"),
    ("--engine", "scripted", "--tokenizer", "."),
    ("--engine", "scripted", "--tokenizer", "plain"),
    ("--engine", "scripted", "--model", "plain"),
    ("--engine", "transformers", "--model", "whole"),
    ("--engine", "transformers", "--model", "weighty", "--engine-arg", "no_such=1"),
    ("--engine", "transformers", "--model", "weighty", "--database-url", "sqlite:///newer.db"),
    ("--engine", "transformers", "--tokenizer", "whole"),
    ("--engine", "sglang", "--model", "weighty", "--engine-arg", "tp-sise=2"),
    ("--engine", "http://127.0.0.1:1", "--engine-arg", "start_timeout_s=nan"),
    ("--engine", "no.such:Engine"),
    ("--engine", "json:Engine"),
    ("--thinking-retention", "none-such"),
    ("--public-url", "foo"),
    ("--engine-timeout-s", "nan"),
    ("--require-key",),
    ("--config", "nowhere.toml"),
    ("doctor", "--family", "none-such"),
    ("doctor", "--model", "nowhere"),
    ("doctor", "--model", "plain"),
    ("doctor", "--engine", "127.0.0.1:1"),
    ("doctor", "--engine", "http://127.0.0.1:1", "--engine-arg", "foo=1"),
)
"""Flags that are refused. `whole` has a tokenizer and a template, `plain` no template, `weighty` weights too."""

_EACH = """
import json, os, sys
import proxy.app
from tokengrove.commands import main

for number, flags in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        continue
    os.dup2(os.open(f"said-{number}", os.O_WRONLY | os.O_CREAT), 2)
    sys.argv = ["tokengrove", *(flags if flags[0] == "doctor" else ["serve", "--port", "0", *flags])]
    try:
        main()
    finally:
        with open(f"imported-{number}", "w") as listed:
            listed.write(json.dumps(sorted(sys.modules)))
"""


def _write_folders(folder: Path) -> None:
    """Model folders that lack something, databases that are refused, and an SGLang of which only the source is read."""
    for name in ("plain", "whole", "weighty"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text('{"model_type": "qwen3"}')
        (folder / name / "tokenizer.json").write_text("{}")
        if name != "plain":
            (folder / name / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "weighty" / "model.safetensors").touch()
    (folder / "other.db").write_text("no database" * 100)
    with closing(sqlite3.connect(folder / "newer.db")) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num)")
        connection.execute("INSERT INTO alembic_version VALUES ('9999')")
        connection.commit()
    fields = folder / "sglang" / "srt" / "arg_groups" / "fields"
    fields.mkdir(parents=True)
    (folder / "sglang" / "__init__.py").write_text("raise ImportError('sglang is imported')")
    known = ("model_path", "tokenizer_path", "context_length", "log_level", "weight_version", "tp_size")
    (fields / "all.py").write_text("class All:\n" + "".join(f"    {name}: int = 1\n" for name in known))


def test_a_wrong_flag_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """One test for all flags, in forks of one interpreter: to import the server anew takes a second each time."""
    _write_folders(tmp_path)
    command = [sys.executable, "-c", _EACH, json.dumps(WRONG)]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"] * len(WRONG), done.stderr
    assert [fault for number in range(len(WRONG)) if (fault := _fault_of(tmp_path, number))] == []
    assert not (tmp_path / "tokengrove.db").exists()


def _fault_of(folder: Path, number: int) -> str | None:
    """What is wrong with a refusal: what it imported or what it said; None if nothing is."""
    imported = {name.partition(".")[0] for name in json.loads((folder / f"imported-{number}").read_text())}
    *steps, said = (folder / f"said-{number}").read_text().splitlines()
    begins = ("tokengrove: --", "tokengrove: the database ", "tokengrove: the folder ", "tokengrove: no ")
    light = "sqlalchemy" in imported and not imported & (HEAVY | {"tokenizers", "fastokens"})
    if light and said.startswith(begins) and all(" info    checking the database" in step for step in steps):
        return None
    return f"{WRONG[number]}: {said} {steps} {sorted(imported & (HEAVY | {'tokenizers', 'fastokens'}))}"


def test_the_help_and_the_client_import_little() -> None:
    for code, spared in (
        (
            "from tokengrove.commands import main",
            HEAVY | {"numpy", "sqlalchemy", "starlette", "aiohttp", "httpx", "rich"},
        ),
        ("import tokengrove", HEAVY | {"sqlalchemy", "starlette", "aiohttp", "jinja2", "typer"}),
    ):
        code += "; import sys; print(*{name.partition('.')[0] for name in sys.modules})"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert not set(done.stdout.split()) & spared


def test_the_base_dependencies_hold_no_package_of_the_models() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = {re.split(r"[^\w-]", one)[0] for one in project["dependencies"]}
    assert base and not base & {"torch", "transformers", "renderers", "openai", "tiktoken", "sglang"}
    assert any(one.startswith("transformers") for one in project["optional-dependencies"]["cpu"])


@pytest.mark.parametrize(
    ("package", "pinned"),
    [("rich", "13.9.4"), ("starlette", "1.0.1"), ("tokenizers", "0.22.2"), ("zstandard", "0.25.0"), ("numpy", "2.2.6")],
)
def test_versions_that_trainers_pin_fit_the_base_dependencies(package: str, pinned: str) -> None:
    """As litellm's proxy, verl, TRL and AReaL require them beside the client."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (required,) = (one for one in map(Requirement, project["dependencies"]) if one.name == package)
    assert pinned in required.specifier
