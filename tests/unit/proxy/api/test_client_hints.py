"""What headers say about a turn."""

from __future__ import annotations

import pytest

from proxy.api.client_hints import add_headers
from proxy.protocols.chat.protocol import ChatProtocol
from tests.support import user


@pytest.mark.parametrize(
    ("count", "retry"),
    [
        *(("0", False), ("00", False), ("1", True), ("010", True), ("0" * 5000, False), ("9" * 5000, True)),
        *(("-1", False), ("x", False), ("\xb2", False), ("", False)),
    ],
)
def test_a_count_above_zero_marks_a_retry_and_a_malformed_one_is_ignored(count: str, retry: bool) -> None:
    asked = ChatProtocol().parse({"model": "m", "messages": [user("hi")]})
    add_headers(asked, {b"x-stainless-retry-count": count}, None)
    assert asked.retry is retry
