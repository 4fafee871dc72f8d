"""The page's pure logic, tested by Node.js without a browser: `node --test tests/browser/js`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.browser import tools

TESTS = sorted((Path(__file__).parent / "js").glob("*.test.mjs"))


def test_all_tests_in_javascript_pass() -> None:
    assert TESTS
    ran = subprocess.run([tools.node(), "--test", *map(str, TESTS)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
