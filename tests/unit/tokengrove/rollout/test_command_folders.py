"""The working folder of a command: a copy, a worktree, a clone or an empty one, whose source stays as it was."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import real_server, until
from tests.unit.tokengrove.rollout.command_episodes import KEY, Commands, sh
from tokengrove.errors import InvalidRequest
from tokengrove.rollout.command import CommandAgent, workplace
from tokengrove.rollout.command.checkout import add_worktree
from tokengrove.rollout.sandboxes.cleaning import WORKTREE, clean

GIT = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "PATH": os.environ["PATH"]}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with real_server(tmp_path_factory.mktemp("folders"), engine_arg=("play=babble",), admin_key=KEY) as url:
        yield Commands(url)


def git(folder: Path, *words: str) -> str:
    named = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    done = subprocess.run(
        ["git", *named, *words], cwd=folder, env=GIT, check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits; the second has the solution."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "notes.txt").write_text("one\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    (folder / "solution.txt").write_text("two\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "two")
    return folder


def state(repository: Path) -> list[str]:
    """What a repository knows, and whether its own folder is clean."""
    return [
        git(repository, "worktree", "list", "--porcelain"),
        git(repository, "worktree", "prune", "--dry-run", "--verbose"),
        git(repository, "for-each-ref"),
        git(repository, "status", "--porcelain"),
        git(repository, "config", "--list", "--local"),
    ]


async def test_a_copy_is_new_in_each_episode_and_its_source_stays(commands: Commands, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "run.sh").write_text("echo ran\n")
    (source / "deep" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("deep/run.sh")
    script = "test -L link; test -x deep/run.sh; sh deep/run.sh; rm -r deep; ls"
    for _ in range(2):
        printed = await commands.printed(
            f"set -e; {script}", tmp_path, copy="{data.folder}", data={"folder": str(source)}
        )
        assert printed == "ran\nlink\n"
    assert (source / "deep" / "run.sh").exists()


async def test_an_empty_folder_is_the_default(commands: Commands, tmp_path: Path) -> None:
    assert await commands.printed("ls -A", tmp_path) == ""


async def test_a_folder_that_is_a_worktree_is_not_copied(commands: Commands, repository: Path, tmp_path: Path) -> None:
    git(repository, "worktree", "add", "-q", "--detach", str(tmp_path / "other"))
    with pytest.raises(InvalidRequest, match="give the repository as --worktree or --clone"):
        await commands.rewarded("true", copy=str(tmp_path / "other"))


@pytest.mark.parametrize("kind", ["worktree", "clone"])
async def test_parallel_episodes_have_a_checkout_each_and_the_repository_forgets_them(
    commands: Commands, repository: Path, kind: str
) -> None:
    before = state(repository)
    first = git(repository, "rev-parse", "HEAD~1")
    words = sh(
        "test ! -e solution.txt",
        "echo $PWD >> notes.txt",
        "git commit -qam mine",
        'test "$(git diff --name-only HEAD~1)" = notes.txt',
        f'test "$(git rev-parse HEAD~1)" = {first}',
    )
    options = {kind: str(repository), "commit": "{data.base}", "verifier": 'test "$(wc -l < notes.txt)" -eq 2'}
    played = [commands.rewarded(*words, data={"base": "main~1"}, **options) for _ in range(6)]
    assert await asyncio.gather(*played) == [1.0] * 6
    assert state(repository) == before


async def test_an_episode_that_is_cancelled_while_git_works_leaves_no_worktree(
    commands: Commands, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, begun, go_on = state(repository), threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        add_worktree(*arguments)

    monkeypatch.setattr(workplace, "add_worktree", slow)
    playing = asyncio.ensure_future(commands.rewarded("true", worktree=str(repository)))
    await until(begun.is_set)
    playing.cancel()
    ended, _ = await asyncio.wait({playing}, timeout=0.3)
    go_on.set()
    assert not ended
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert state(repository) == before


async def test_a_clone_has_branches_of_its_own_and_none_of_the_repository(
    commands: Commands, repository: Path, tmp_path: Path
) -> None:
    git(repository, "branch", "secret")
    before = state(repository)
    script = "git checkout -qb fix && git for-each-ref --format='%(refname)' && git log --all --format=%s && git remote"
    printed = await commands.printed(script, tmp_path, clone=str(repository), commit="HEAD~1")
    assert printed.split() == ["refs/heads/fix", "refs/heads/main", "one"]
    assert state(repository) == before


async def test_a_bare_repository_and_a_shallow_one_are_checked_out(
    commands: Commands, repository: Path, tmp_path: Path
) -> None:
    git(tmp_path, "clone", "-q", "--bare", str(repository), "bare")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", "shallow")
    for kind in ("worktree", "clone"):
        for name in ("bare", "shallow"):
            printed = await commands.printed(
                "git log --format=%s | head -1; ls", tmp_path, **{kind: str(tmp_path / name)}
            )
            assert printed.split() == ["two", "notes.txt", "solution.txt"]


async def test_what_git_says_is_told(commands: Commands, repository: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"repository has no commit 'no-such-branch'"):
        await commands.rewarded("true", worktree=str(repository), commit="no-such-branch")
    (tmp_path / "plain").mkdir()
    with pytest.raises(InvalidRequest, match="not a git repository"):
        await commands.rewarded("true", clone=str(tmp_path / "plain"))


def test_the_worktree_of_a_process_that_died_is_forgotten_with_its_folder(repository: Path, tmp_path: Path) -> None:
    before = state(repository)
    sandboxes = tmp_path / "sandboxes"
    for name in ("0", "1"):
        (sandboxes / name).mkdir(parents=True)
    git(repository, "worktree", "add", "-q", "--detach", str(sandboxes / "0" / "work"))
    (sandboxes / "0" / WORKTREE).write_text(git(sandboxes / "0" / "work", "rev-parse", "--absolute-git-dir"))
    (sandboxes / "1" / WORKTREE).write_text(str(repository / ".git"))  # an agent may write anything there
    clean(str(sandboxes), "no-such-mark")
    assert not sandboxes.exists()
    assert state(repository) == before


async def test_files_and_a_home_are_put_in_place_with_values_of_the_episode(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".agentrc").write_text("of the user")
    files = {"conf/{task_id}.json": '{"url": "{base_url}", "x": {}}', "~/.more": "{model}"}
    script = "cat conf/trees.json; echo; cat ~/.agentrc ~/.more; echo gone > ~/.agentrc"
    printed = await commands.printed(script, tmp_path, files=files, home=str(tmp_path / "home"))
    written, rest = printed.splitlines()
    assert written.startswith(f'{{"url": "{commands.url}/')
    assert written.endswith('/v1", "x": {}}')
    assert rest == "of the usertokengrove"
    assert (tmp_path / "home" / ".agentrc").read_text() == "of the user"


@pytest.mark.parametrize("path", ["../out", "~/../out", "/tmp/out"])
async def test_a_file_outside_of_the_folders_is_refused(commands: Commands, path: str) -> None:
    with pytest.raises(InvalidRequest, match="is outside of the working folder"):
        await commands.rewarded("true", files={path: "x"})


async def test_setup_runs_first_in_the_folder_without_keys(commands: Commands, tmp_path: Path) -> None:
    setup = 'mkdir made; echo "$PWD $OPENAI_API_KEY" > made/by'
    printed = await commands.printed("pwd; cat made/by", tmp_path, setup=setup)
    folder, seen = printed.splitlines()
    assert seen == f"{folder} "
    with pytest.raises(InvalidRequest, match="setup exited with 4: no way"):
        await commands.rewarded("true", setup="echo no way; exit 4")


async def test_codex_finds_its_configuration_in_home(commands: Commands) -> None:
    import tomllib

    plan = commands.plan("cp", "{home}/.codex/config.toml", "config.toml", verifier_function=f"{__name__}:read_codex")
    async with commands.episode(plan) as episode:
        assert await CommandAgent(plan.agent).play(episode) == 1.0
        provider = tomllib.loads(_read[-1])["model_providers"]["tokengrove"]
        assert (provider["base_url"], provider["wire_api"]) == (episode.session.base_url, "responses")


_read: list[str] = []


def read_codex(workdir: Path) -> float:
    _read.append((workdir / "config.toml").read_text())
    return 1.0


@pytest.mark.parametrize("option", ["copy", "worktree", "clone", "home"])
async def test_a_field_of_the_data_leads_to_no_folder_above_the_one_that_is_named(
    commands: Commands, tmp_path: Path, option: str
) -> None:
    (tmp_path / "public").mkdir()
    options = {option: f"{tmp_path}/public/{{data.name}}"}
    result = await commands.played("true", data={"prompt": "Go.", "name": "../private"}, **options)
    assert result.failure == "agent"
    assert "a field in a path must not contain '..'" in str(result.message)
