"""What may not be released is refused before anything is built, and the tree names one version."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from supply import release
from supply.release import Refused
from tokengrove import __version__


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git repository with one commit of a changelog and a compose file."""
    (tmp_path / "docker").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {__version__}\n\n- new\n")
    (tmp_path / "docker" / "compose.yml").write_text(f"    image: tokengrove:{__version__}\n    # tokengrove:8080\n")
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "one")):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *command],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
    return tmp_path


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces what installs packages. The files of the release are two bytes each."""

    def build(root: Path, folder: Path) -> list[Path]:
        (folder / "a-1.whl").write_text("w\n")
        (folder / "a-1.tar.gz").write_text("s\n")
        return sorted(folder.iterdir())

    def write_bill(wheel: Path, output: Path) -> None:
        assert wheel.read_text() == "w\n"
        output.write_text("{}")

    monkeypatch.setattr(release, "build", build)
    monkeypatch.setattr(release, "write_bill", write_bill)


def test_no_file_of_this_tree_names_an_image_of_another_version() -> None:
    assert release.other_tags(release.ROOT, __version__) == []
    assert release.other_tags(release.ROOT, "0.0.1")


@pytest.mark.usefixtures("built")
def test_a_clean_tree_is_released_with_sums_that_sha256sum_confirms(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("to") / "new"
    sums = release.release(checkout, folder)
    assert sums.count("\n") == 3 and sums == (folder / "SHA256SUMS").read_text()
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True, capture_output=True)
    with pytest.raises(Refused, match="is not empty"):
        release.release(checkout, folder)


@pytest.mark.usefixtures("built")
def test_a_tree_with_a_change_or_a_new_file_is_released_on_trial_only(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (checkout / "new.py").write_text("")
    folder = tmp_path_factory.mktemp("to")
    with pytest.raises(Refused, match=r"differs from its commit(.|\n)*new\.py"):
        release.release(checkout, folder)
    assert list(folder.iterdir()) == []
    assert release.release(checkout, folder, trial=True)


@pytest.mark.usefixtures("built")
def test_an_image_of_another_version_is_refused_with_its_place_also_on_trial(checkout: Path) -> None:
    (checkout / "docs" / "page.md").write_text("none\ndocker run tokengrove:0.9.1\n")
    (checkout / "docker" / "kustomization.yaml").write_text("    newTag: 0.9.1\n")
    with pytest.raises(Refused, match=r"docker/kustomization\.yaml:1, docs/page\.md:2"):
        release.release(checkout, checkout / "to", trial=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("# Changelog\n\n## Unreleased\n\n- new\n\n## 1.0.0rc1\n\n- old\n", r"begins with \['Unreleased'\]"),
        ("# Changelog\n\n## 1.0.0rc10\n\n- new\n", r"begins with \['1.0.0rc10'\]"),
        ("# Changelog\n", r"begins with \[\]"),
        ("# Changelog\n\n## 1.0.0rc1\n\n## 0.9\n\n- old\n", "says nothing of 1.0.0rc1"),
    ],
)
def test_a_changelog_that_does_not_begin_with_the_version_is_refused(text: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        release.check_changelog(text, "1.0.0rc1")


def test_a_changelog_may_have_a_date_behind_the_version() -> None:
    release.check_changelog("# Changelog\n\n## 1.0.0rc1 (2026-12-01)\n\n- new\n", "1.0.0rc1")
