"""Messages of errors: whole, unless they quote something very long."""

from __future__ import annotations

import pytest

from proxy.errors import InvalidRequest


@pytest.mark.parametrize("length", [0, 1, 4000])
def test_a_message_is_whole(length: int) -> None:
    message = "x" * length
    assert InvalidRequest(message).message == message


def test_of_a_message_that_quotes_an_image_the_middle_is_left_out() -> None:
    error = InvalidRequest(f"'type' is {'data:image/png;base64,' + 'A' * 1_000_000!r}; this server accepts text")
    assert len(error.message) < 4100
    assert error.message.startswith("'type' is 'data:image/png;base64,AAA")
    assert error.message.endswith("AAA'; this server accepts text")
    assert "characters left out" in error.message
    assert str(error) == error.message
