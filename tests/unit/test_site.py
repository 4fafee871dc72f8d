"""The source of the documentation site: what becomes of pages, links, files, folders and comments."""

from __future__ import annotations

import tomllib
from pathlib import Path, PurePosixPath

import pytest

from supply import site
from supply.site import Broken, Pages

README = """# Grove

<!-- not run: a reason -->
```bash
echo '[no](link.md)'  # <!-- stays -->
<!-- stays -->
```

[All](docs/index.md), [out](https://example.org/x.md), [here](#grove), [file](code/a.py), [folder](code/).
"""
INDEX = """# All pages

## Learn

[train](train.md), [verl](verl.md#names), [home](../README.md).

## Again

[train](train.md#more), [outside](https://example.org/y.md).

## Develop

[map](../code/MAP.md).
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "README.md": README,
        "docs/index.md": INDEX,
        "docs/train.md": "# Train: all\n\n![picture](images/a.svg) [up](../code/b.yaml#x)\n",
        "docs/verl.md": "# Coming from verl\n\n- [back](train.md)\n",
        "docs/alone.md": "# Linked from nowhere\n",
        "docs/images/a.svg": "<svg/>",
        "docs/images/dark.png": "of a picture tag",
        "docs/zensical.toml": (site.ROOT / "docs" / "zensical.toml").read_text(),
        "code/MAP.md": "# Map\n",
        "code/a.py": '"""Does a.\n\nMore."""\n\nTEXT = "```"\n',
        "code/b.yaml": "a: 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def pages_of(root: Path) -> Pages:
    pages = Pages(root)
    pages.add(site.HOME)
    return pages


def test_the_site_has_what_links_lead_to_at_the_paths_of_the_repository(root: Path) -> None:
    pages = pages_of(root)
    assert {str(path) for path in pages.texts} == {
        *("README.md", "docs/index.md", "docs/train.md", "docs/verl.md", "code/MAP.md"),
        *("code/a.py.md", "code/b.yaml.md", "code/index.md"),
    }
    assert pages.images == {PurePosixPath("docs/images/a.svg")}


def test_links_to_files_and_folders_lead_to_their_pages_and_others_stay(root: Path) -> None:
    pages = pages_of(root)
    home = pages.texts[site.HOME]
    assert home.endswith(
        "[All](docs/index.md), [out](https://example.org/x.md), [here](#grove), [file](code/a.py.md), "
        "[folder](code/index.md).\n"
    )
    assert "[up](../code/b.yaml.md#x)" in pages.texts[PurePosixPath("docs/train.md")]
    assert pages.texts[PurePosixPath("code/index.md")] == "# code\n\n- [a.py](a.py.md): Does a.\n"


def test_comments_are_left_out_but_for_those_in_code_and_code_stays_as_it_is(root: Path) -> None:
    home = pages_of(root).texts[site.HOME]
    assert "not run" not in home
    assert "```bash\necho '[no](link.md)'  # <!-- stays -->\n<!-- stays -->\n```\n" in home


def test_a_file_that_has_fences_is_shown_in_a_longer_one(root: Path) -> None:
    text = pages_of(root).texts[PurePosixPath("code/a.py.md")]
    assert text.startswith('# code/a.py\n\n``````python\n"""Does a.') and text.endswith('"```"\n``````\n')


def test_a_link_to_nothing_is_refused_with_its_page(root: Path) -> None:
    (root / "docs" / "verl.md").write_text("# V\n\n[gone](../code/gone.py)\n")
    with pytest.raises(Broken, match=r"docs/verl\.md links to \.\./code/gone\.py, which is not there"):
        pages_of(root)


def test_a_folder_with_files_is_refused_and_stays_as_it_is(root: Path) -> None:
    with pytest.raises(Broken, match="is not empty"):
        site.build(root, root / "code")
    assert (root / "code" / "a.py").exists()


def test_the_navigation_is_that_of_the_index_then_the_reference_then_the_rest(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    site.write_source(root, folder)
    project = tomllib.loads((folder / "zensical.toml").read_text())["project"]
    *sections, reference, files = project["nav"]
    assert sections == [
        {"Tokengrove": "README.md"},
        {"All pages": "docs/index.md"},
        {"Learn": [{"Train": "docs/train.md"}, {"verl": "docs/verl.md"}]},
        {"Develop": [{"Map": "code/MAP.md"}]},
    ]
    assert [path for entry in reference["Python API"] for path in entry.values()] == [
        f"api/{module}.md" for module in site.API
    ]
    assert files == {
        "Files": [
            {"code/a.py": "code/a.py.md"},
            {"code/b.yaml": "code/b.yaml.md"},
            {"code/index": "code/index.md"},
        ]
    }
    assert project["plugins"]["mkdocstrings"]["handlers"]["python"]["paths"] == [str(root)]
    written = {
        path.relative_to(folder / "pages").as_posix() for path in (folder / "pages").rglob("*.*") if path.is_file()
    }
    assert {"docs/images/a.svg", "docs/images/dark.png", "api/tokengrove.md", "code/a.py.md"} <= written


def test_the_documents_of_this_tree_can_be_a_site_and_every_page_of_docs_is_in_it() -> None:
    pages = pages_of(site.ROOT)
    docs = {PurePosixPath("docs", path.name) for path in (site.ROOT / "docs").glob("*.md")}
    listed = {path for _, entries in site.sections(pages) for _, path in entries}
    assert docs == {path for path in listed if path.parent.name == "docs"} | {site.INDEX}
    assert docs < pages.texts.keys()
