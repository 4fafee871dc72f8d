"""The command that tests the newest releases reads what uv and pytest say, and tells what broke."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from supply import newest
from supply.newest import Result, Set, Suite

REPORT = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" tests="4">
<testcase classname="tests.test_sdks" name="test_chat[plain]" time="0.1" />
<testcase classname="tests.test_sdks" name="test_tools">
<failure message="TypeError: no field 'x'&#10;more">...</failure></testcase>
<testcase classname="tests.test_sdks" name="test_stream"><error message="">...</error></testcase>
<testcase classname="tests.test_sdks" name="test_gone"><skipped message="not installed" /></testcase>
</testsuite></testsuites>"""
CONFLICT = """error: No solution found when resolving dependencies
  cause: Because litellm==1.106.2 depends on openai<3 and you require openai==3.54.0, we can conclude that
         litellm==1.106.2 cannot be used.
         And because you require litellm==1.106.2, we can conclude that your requirements are unsatisfiable.

hint: Pre-releases are available
"""
MISSING = "error: Failed to download `gone==9`\n  cause: HTTP status 404\n"
SDKS = Set("sdks", {"openai": "3.54.0", "agents[all]": "1.0"}, (Suite("tests"),), kept=["torch==2.13.0"])


def test_exact_versions_are_read_with_their_extras_and_without_comments_and_other_systems() -> None:
    text = "# a comment\nopenai==3.54.0\ncrewai[b,a]==1.15.30  # why\nnumpy>=2\nwin==1; sys_platform == 'win32'\n"
    assert newest.pins(text) == {"openai": "3.54.0", "crewai[a,b]": "1.15.30"}


def test_every_requirements_file_of_clients_is_a_set_and_every_pin_is_known() -> None:
    sets = newest.sets()
    files = {path.stem.removeprefix("requirements-") for path in newest.CONFORMANCE.glob("requirements*.txt")}
    assert sets.keys() == files - {"requirements"} | {"sdks", "dependencies", "sglang"}
    assert {"openai", "anthropic"} <= sets["sdks"].pinned.keys()
    assert sets["dependencies"].pinned.keys() >= {"starlette", "sqlalchemy", "psycopg[binary]", "transformers"}
    assert all(suite.paths for each in sets.values() for suite in each.suites)
    named = [path for each in sets.values() for suite in each.suites for path in suite.paths.split()]
    assert all((newest.ROOT / path).exists() for path in named)


def test_a_report_is_read_as_counts_and_the_first_line_of_each_error() -> None:
    assert newest.read_report(REPORT) == (
        1,
        ["tests.test_sdks.test_tools: TypeError: no field 'x'", "tests.test_sdks.test_stream: failed"],
    )


def test_a_conflict_is_told_in_one_line() -> None:
    told = newest.conflict_of(CONFLICT)
    assert told.startswith("Because litellm==1.106.2 depends on openai<3 and you require openai==3.54.0, we can")
    assert told.endswith("we can conclude that your requirements are unsatisfiable.") and "\n" not in told
    assert newest.conflict_of(MISSING) == "Failed to download `gone==9`"
    assert newest.conflict_of("Traceback\nOSError: full\n") == "OSError: full"
    assert newest.conflict_of("") == "the installation failed"


def test_the_table_has_each_package_and_each_failure() -> None:
    result = Result({"openai": "3.60.0", "agents[all]": "1.0"}, "a conflict", failed=["test_tools: no"], passed=7)
    assert newest.table(SDKS, {"openai": "3.60.0", "agents[all]": "2.0"}, result) == (
        "sdks: 7 passed, 1 failed\n"
        "package      pinned  newest  installed\n"
        "openai       3.54.0  3.60.0  3.60.0\n"
        "agents[all]  1.0     2.0     1.0\n"
        "these versions conflict: a conflict\n"
        "BROKEN: test_tools: no\n"
    )


class Programs:
    """Stands for the programs that are run: pip, uv and pytest. `answers`: exit code and output, in order."""

    def __init__(self, answers: list[tuple[int, str]]) -> None:
        self.answers, self.asked = answers, list[list[str]]()

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.asked.append(command)
        for report in [Path(each.partition("=")[2]) for each in command if each.startswith("--junitxml=")]:
            report.write_text(REPORT)
        code, output = self.answers.pop(0)
        return subprocess.CompletedProcess(command, code, output, "")


def listed(**versions: str) -> str:
    return json.dumps([{"name": name, "version": version} for name, version in versions.items()])


def test_where_the_newest_conflict_what_fits_together_is_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = Programs([(0, ""), (1, CONFLICT), (0, ""), (0, listed(openai="3.60.0", agents="1.5")), (1, "")])
    monkeypatch.setattr(subprocess, "run", ran)
    result = newest.test(SDKS, {"openai": "3.60.0", "agents[all]": "2.0"}, tmp_path)
    assert ran.asked[1][-3:] == ["torch==2.13.0", "openai==3.60.0", "agents[all]==2.0"]
    assert ran.asked[2][-3:] == ["torch==2.13.0", "openai>=3.54.0", "agents[all]>=1.0"]
    assert "litellm==1.106.2 depends on openai<3" in result.conflict
    assert result.installed == {"openai": "3.60.0", "agents[all]": "1.5"}
    assert (result.passed, len(result.failed), result.broke) == (1, 2, True)


def test_what_cannot_be_installed_is_broken_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", Programs([(0, ""), (1, MISSING), (1, MISSING)]))
    result = newest.test(SDKS, {"openai": "3.60.0", "agents[all]": "2.0"}, tmp_path)
    assert result.broke and result.unusable.startswith("cannot be installed: Failed to download")


def test_a_set_without_anything_newer_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(newest, "sets", lambda: {"sdks": SDKS})
    monkeypatch.setattr("shutil.which", lambda _: "uv")
    report = {
        "install": [
            {"metadata": {"name": "OpenAI", "version": "3.54.0"}},
            {"metadata": {"name": "agents", "version": "1.0"}},
        ]
    }
    monkeypatch.setattr(subprocess, "run", Programs([(0, json.dumps(report))]))
    assert newest.run([], everything=False, keep=None)
    assert capsys.readouterr().out == "sdks: nothing is newer than what is pinned\n\n"


def test_what_the_newest_leader_pins_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    about = {
        "name": "sglang",
        "version": "0.6",
        "requires_dist": ["torch==2.14.0", "xgrammar==1; sys_platform != 'win32'", "a>=1"],
    }
    monkeypatch.setattr(subprocess, "run", Programs([(0, json.dumps({"install": [{"metadata": about}]}))]))
    engine = Set(
        "e", {}, (), ["torch==2.13.0", "rich"], {"sglang": "0.5", "xgrammar": "0.2", "triton": "3"}, leader="sglang"
    )
    chosen, versions = newest.newest_of(engine)
    assert versions == {"sglang": "0.6", "xgrammar": "1", "triton": "3"}
    assert list(chosen.kept) == ["rich", "torch==2.14.0"]


def test_an_unknown_set_is_named_with_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["newest", "sdk"])
    with pytest.raises(SystemExit):
        newest.main()
    assert "there is no set sdk; there are sdks, " in capsys.readouterr().err
