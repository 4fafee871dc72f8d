"""The files of the page have a version that follows every one of them, since browsers keep them for good."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.page.endpoints import page_files

PAGE = """<html><head>
    <script type="importmap">{"imports": {"lib/": "./ui/lib/"}}</script>
    <script src="ui/app.js"></script>
  </head></html>
"""


def folder(path: Path, app: str) -> Path:
    """A page of three files."""
    (path / "lib").mkdir(parents=True)
    for name, content in {"index.html": PAGE, "app.js": app, "lib/x.js": "x"}.items():
        (path / name).write_text(content)
    return path


def test_the_version_changes_with_any_file_and_with_nothing_else(tmp_path: Path) -> None:
    one, same, other = (
        page_files(folder(tmp_path / name, app)) for name, app in (("one", "a"), ("same", "a"), ("other", "b"))
    )
    assert one.version == same.version != other.version
    assert one.files == same.files
    assert one.files["app.js"].tag != other.files["app.js"].tag
    page = other.files["index.html"].content.decode()
    assert page.count(f"ui/@{other.version}/") == page.count("ui/") == 4


def test_a_file_has_the_same_bytes_whenever_it_is_compressed() -> None:
    for file in page_files().files.values():
        assert file.compressed[4:8] == bytes(4)  # the time, which other servers of a group would have otherwise


SCRIPTS = ["app.js", "lib/html.js", "vendor/preact/preact.mjs", "vendor/preact-hooks/hooks.mjs", "vendor/htm/htm.mjs"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_that_every_view_needs_are_asked_for_at_once(name: str) -> None:
    found = page_files()
    link = f'<link rel="modulepreload" href="ui/@{found.version}/{name}">'
    assert link in found.files["index.html"].content.decode()
