"""The report of a SWE-bench evaluation: which tests pass that should now, and which still pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def tests_status(report: Any) -> Mapping[str, Any] | None:
    """`tests_status` of a report, which may stand inside of an entry of the instance's name."""
    if not isinstance(report, Mapping):
        return None
    for part in (report, *report.values()):
        if isinstance(part, Mapping) and isinstance(part.get("tests_status"), Mapping):
            found: Mapping[str, Any] = part["tests_status"]
            return found
    return None


def pass_rate(status: Mapping[str, Any]) -> float | None:
    """Of the tests that failed before (FAIL_TO_PASS) the share that passes; 0.0 if one of PASS_TO_PASS fails now.

    None if there are no tests of FAIL_TO_PASS.
    """
    passed, failed = (len(_names(status, "FAIL_TO_PASS", which)) for which in ("success", "failure"))
    if passed + failed == 0:
        return None
    return 0.0 if _names(status, "PASS_TO_PASS", "failure") else passed / (passed + failed)


def _names(status: Mapping[str, Any], kind: str, which: str) -> Any:
    return (status.get(kind) or {}).get(which) or ()
