"""`--model ORG/NAME[@REVISION]` loads what it needs from the Hugging Face hub, here one on loopback, or its cache."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from proxy.engine.create import model_folder
from proxy.settings import Settings
from tests.e2e.fake_hub import NEW, OLD, REPO, TOKEN, Hub, hub
from tests.e2e.processes import ROOT, execute, run, server_process

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def served() -> Iterator[Hub]:
    """The built-in model under two commits, of which the old one has only old weights."""
    folder = model_folder(Settings())
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert WEIGHTS in files and "tokenizer.json" in files
    more = {"README.md": b"words", "onnx/model.safetensors": b"copy", "consolidated.safetensors": b"copy"}
    old = {name: data for name, data in files.items() if name != WEIGHTS}
    with hub({NEW: {**files, **more}, OLD: {**old, "pytorch_model.bin": b"old", "training.log": b"log"}}) as started:
        yield started


@pytest.fixture
def home(tmp_path: Path, served: Hub, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's client."""
    served.asked.clear()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(served, "private", False)
    return tmp_path


def names(served: Hub, commit: str) -> set[str]:
    """The files of a commit that were fetched."""
    return {name.partition("/")[2] for name in served.asked if name.startswith(commit)}


def python(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter, because the hub's client reads its variables when it is imported."""
    code = f"from proxy import hub\nfrom proxy.settings import Settings\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_a_server_without_weights_fetches_only_what_describes_the_model(home: Path, served: Hub) -> None:
    with server_process(home, "--engine", "scripted", "--model", REPO, python=sys.executable) as process:
        shown = httpx.get(f"{process.url}/engine").json()
        [model] = httpx.get(f"{process.url}/v1/models").json()["data"]
        body = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
        assert httpx.post(f"{process.url}/s/v1/chat/completions", json=body).status_code == 200
    assert (model["id"], shown["revision"]) == (REPO, NEW)
    assert f"revision  {NEW}" in process.output
    fetched = names(served, NEW)
    assert {"config.json", "tokenizer.json"} <= fetched and not fetched & {WEIGHTS, "README.md"}
    assert not names(served, OLD)


def test_a_revision_is_taken_and_after_that_the_cache_is_enough(
    home: Path, served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = execute("doctor", "--model", f"{REPO}@v1", cwd=home)
    assert done.returncode == 0, done.stderr
    assert names(served, OLD) and not names(served, NEW)
    served.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again = execute("doctor", "--model", f"{REPO}@v1", cwd=home)
    assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr
    assert served.asked == []


def test_weights_are_fetched_where_an_engine_loads_them_once_the_tokenizer_is_there(home: Path, served: Hub) -> None:
    code = f"""
from proxy.engine.create import prepare_engine, tokenizer_folder
settings = hub.pinned(Settings(model={REPO!r}, engine="transformers"))
print(tokenizer_folder(settings).name, settings.model)
make = prepare_engine(settings)
assert not list(tokenizer_folder(settings).glob("*.safetensors"))
engine = make(1, None)
print(*sorted(path.name for path in engine._folder.glob("*.safetensors")))
"""
    done = python(home, code)
    assert done.stdout.splitlines() == [f"{NEW} {REPO}@{NEW}", WEIGHTS], done.stderr
    assert served.asked[-1] == f"{NEW}/{WEIGHTS}" and f"{NEW}/tokenizer.json" in served.asked


def test_weights_of_the_older_kind_are_fetched_where_there_are_no_others(home: Path, served: Hub) -> None:
    code = f"""
name = hub.pinned(Settings(model="{REPO}@v1")).model
hub.fetch_weights(name)
print(hub.folder_of("model", name).name)
"""
    done = python(home, code)
    assert done.stdout.strip() == OLD, done.stderr
    assert "pytorch_model.bin" in names(served, OLD) and "training.log" not in names(served, OLD)


def test_it_is_told_how_much_of_the_weights_is_fetched(home: Path) -> None:
    code = f"""
name = hub.pinned(Settings(model="{REPO}")).model
so_far = hub._fetched(hub.parse_name(name))
before = so_far()
hub.fetch_weights(name)
blobs = hub.folder_of("model", name).parents[1] / "blobs"
print(before != so_far() == f"{{sum(blob.stat().st_size for blob in blobs.iterdir()) / 1e6:,.0f}} MB are here")
"""
    done = python(home, code)
    assert done.stdout.strip() == "True", done.stderr


def test_a_cache_without_weights_says_so_offline(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert python(home, f"hub.pinned(Settings(model={REPO!r}))").returncode == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused = python(home, f"hub.fetch_weights({REPO!r})")
    assert "ConfigurationError" in refused.stderr and WEIGHTS in refused.stderr


def test_a_private_model_needs_the_token_of_the_environment(
    home: Path, served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "private", True)
    [refused] = refusals(home, model=REPO)
    assert "HF_TOKEN" in refused
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert python(home, f"hub.pinned(Settings(model={REPO!r}))").returncode == 0


def refusals(folder: Path, **sources: str) -> list[str]:
    """The errors for these flags; a name like `model_2` is the flag `model` again."""
    tries = [(flag.partition("_")[0], source) for flag, source in sources.items()]
    code = f"""
from tokengrove.errors import ConfigurationError
for flag, source in {tries!r}:
    try:
        hub.pinned(Settings(**{{flag: source}}))
    except ConfigurationError as error:
        print(error)
"""
    done = python(folder, code)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_is_neither_a_folder_nor_on_the_hub_is_refused_in_one_line(home: Path) -> None:
    dotted, bare, tokenizer, unknown, revision = refusals(
        home, model="./x", model_2="x", tokenizer="/no/where", model_3="org/other", model_4=f"{REPO}@v9"
    )
    way_out = "a name like ORG/NAME or ORG/NAME@REVISION is fetched from the Hugging Face hub"
    assert dotted.startswith(f"--model ./x: there is no folder ./x; {way_out}")
    assert bare.startswith(f"--model x: there is no folder x; {way_out}")
    assert tokenizer.startswith(f"--tokenizer /no/where: there is no folder /no/where; {way_out}")
    assert unknown.startswith("--model org/other: there is no folder org/other, and the Hugging Face hub does not give")
    assert revision == f"--model {REPO}@v9: the Hugging Face hub has no revision 'v9' of {REPO}"


def test_a_hub_that_cannot_be_reached_is_named_with_the_reason(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    [offline] = refusals(home, model=REPO)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    [down] = refusals(home, model=REPO)
    for refused in (offline, down):
        assert refused.startswith(
            f"--model {REPO}: there is no folder {REPO}, and it cannot be fetched from the Hugging"
        )
    assert "HF_HUB_OFFLINE" in offline


def test_a_missing_folder_is_refused_on_the_command_line(home: Path) -> None:
    refused = run("serve", "--engine", "scripted", "--model", "./x", cwd=home)
    assert refused.returncode == 1 and "there is no folder ./x" in refused.stderr


def test_a_folder_of_that_name_comes_first_and_needs_no_client(home: Path, served: Hub) -> None:
    (home / "org").mkdir()
    (home / REPO).symlink_to(model_folder(Settings()))
    code = f"""
import sys
from proxy.app import build_app
app = build_app(Settings(model={REPO!r}, engine="scripted", database_url="sqlite:///t.db"))
print(app.state.model, app.state.revision, "huggingface_hub" in sys.modules)
"""
    done = python(home, code)
    assert done.stdout.split()[1:] == ["None", "False"], done.stderr
    assert served.asked == []
