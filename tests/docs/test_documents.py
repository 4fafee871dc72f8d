"""Every code block of the documents works as it is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, Unmarked, blocks_of, check_marked, check_syntax, pages
from tests.docs.session import PageSession, check_shape

PAGES = {str(path.name): path for path in pages() if path.is_file()}
LONG = [name for name, path in PAGES.items() if any(block.directive == "long" for block in blocks_of(path))]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_marked_as_output(page: str) -> None:
    blocks = blocks_of(PAGES[page])
    check_marked(blocks)
    for block in blocks:
        check_syntax(block)


@pytest.mark.processes
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_work_one_after_the_other(page: str, tmp_path: Path) -> None:
    inside = ROOT if page == "CONTRIBUTING.md" else None
    with PageSession(tmp_path, inside=inside) as session:
        session.follow(blocks_of(PAGES[page]))


@pytest.mark.engines
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", LONG)
def test_the_long_blocks_of_a_page_work_too(page: str, tmp_path: Path) -> None:
    with PageSession(tmp_path, long=True) as session:
        session.follow(blocks_of(PAGES[page]))


def written(folder: Path, text: str) -> list[Block]:
    (folder / "page.md").write_text(text, encoding="utf-8")
    return blocks_of(folder / "page.md")


@pytest.mark.parametrize("language", ["", "sh", "console", "yaml", "json"])
def test_a_block_that_nothing_runs_and_nothing_marks_is_refused(tmp_path: Path, language: str) -> None:
    with pytest.raises(Unmarked, match=r"page\.md:3"):
        check_marked(written(tmp_path, f"A text.\n\n```{language}\nx: 1\n```\n"))


@pytest.mark.parametrize("comment", ["not run", "not run:", "later: no", "continues: x", "file"])
def test_a_comment_that_is_no_directive_is_refused(tmp_path: Path, comment: str) -> None:
    with pytest.raises(Unmarked):
        written(tmp_path, f"<!-- {comment} -->\n```bash\nfalse\n```\n")


@pytest.mark.parametrize(
    "text",
    [
        "```bash\nfalse | true\n```\n",
        "```bash\necho $UNKNOWN\n```\n",
        "```python\nassert False\n```\n",
        '```bash\necho \'{"error": {"message": "no"}}\'\n```\n',
        '```bash\necho \'{"a": 1}\'\n```\n\n```json\n{"a": "1"}\n```\n',
        "```bash\necho 1\n```\n\n<!-- prints -->\n```text\n2\n```\n",
        "<!-- fails: it should -->\n```bash\ntrue\n```\n",
    ],
)
def test_a_block_that_does_not_work_is_noticed(tmp_path: Path, text: str) -> None:
    blocks = written(tmp_path, text)
    with pytest.raises(AssertionError), PageSession(tmp_path) as session:
        session.follow(blocks)


def test_a_block_that_needs_what_is_not_installed_is_left_out_with_what_it_prints(tmp_path: Path) -> None:
    block = (
        "```python\nprint(1)\nopen('ran', 'a')\n```\n<!-- continues -->\n```python\nprint(2)\n```\n"
        "<!-- prints -->\n```text\n1\n2\n```\n"
    )
    with PageSession(tmp_path) as session:
        session.follow(written(tmp_path, f"<!-- needs: no_such_module -->\n{block}"))
        assert not (tmp_path / "ran").exists()
        session.follow(written(tmp_path, f"<!-- needs: json -->\n{block}"))
    assert (tmp_path / "ran").exists()


def test_blocks_share_a_folder_and_variables(tmp_path: Path) -> None:
    text = (
        "```bash\nname=grove\n```\n<!-- file: lines.py -->\n```python\nlines = 2\n```\n"
        "```python\nimport lines\n```\n<!-- continues -->\n```python\nopen('out', 'w').write('x' * lines.lines)\n```\n"
        '```bash\ntest "$name$(cat out)" = grovexx\n```\n'
    )
    with PageSession(tmp_path) as session:
        session.follow(written(tmp_path, text))


@pytest.mark.parametrize(
    ("shown", "real"),
    [({"a": 1}, {"a": 1, "b": 2}), ({"a": None}, {"a": 1}), ({"a": [1]}, {"a": []}), ([{"a": 1}], [{"a": "x"}])],
)
def test_a_reply_of_another_shape_is_noticed(shown: object, real: object) -> None:
    with pytest.raises(AssertionError):
        check_shape(Block("page.md", 1, "json", ""), shown, real)


def test_a_reply_of_the_same_shape_is_good_whatever_its_values() -> None:
    check_shape(Block("page.md", 1, "json", ""), {"a": [1], "b": "x"}, {"a": [2.5, 3], "b": "y"})
