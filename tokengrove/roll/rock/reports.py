"""The report of a SWE-bench evaluation: which tests now pass that should, and which tests still pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def tests_status(report: Any) -> Mapping[str, Any] | None:
    """`tests_status` of a report, which may be inside an entry with the instance's name."""
    if not isinstance(report, Mapping):
        return None
    for part in (report, *report.values()):
        if isinstance(part, Mapping) and isinstance(part.get("tests_status"), Mapping):
            found: Mapping[str, Any] = part["tests_status"]
            return found
    return None


def pass_rate(status: Mapping[str, Any]) -> float | None:
    """The share of tests in FAIL_TO_PASS that pass now; 0.0 if a test in PASS_TO_PASS fails now.

    None if there are no tests in FAIL_TO_PASS.
    """
    passed, failed = (len(_names(status, "FAIL_TO_PASS", which)) for which in ("success", "failure"))
    if passed + failed == 0:
        return None
    return 0.0 if _names(status, "PASS_TO_PASS", "failure") else passed / (passed + failed)


def _names(status: Mapping[str, Any], kind: str, which: str) -> Any:
    return (status.get(kind) or {}).get(which) or ()
