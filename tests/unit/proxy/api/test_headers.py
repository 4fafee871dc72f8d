"""Headers of a request: who calls, and for which session."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.api.headers import headers_of, hint_in, key_in


def headers(*pairs: tuple[str, str]) -> Any:
    return headers_of({"headers": [(name.encode(), value.encode("latin-1")) for name, value in pairs]})


def test_of_a_repeated_header_the_first_counts() -> None:
    assert headers(("a", "1"), ("b", "\xe9"), ("a", "2")) == {b"a": "1", b"b": "\xe9"}


@pytest.mark.parametrize(
    ("sent", "key"),
    [
        ([("authorization", "Bearer  k ")], "k"),
        ([("authorization", "bearer k"), ("x-api-key", "other")], "k"),
        ([("authorization", "Bearer "), ("x-api-key", "other")], "other"),
        ([("authorization", "Basic k"), ("x-api-key", "other")], "other"),
        ([("x-api-key", "")], None),
        ([], None),
    ],
)
def test_the_key_is_the_bearer_token_else_x_api_key(sent: list[tuple[str, str]], key: str | None) -> None:
    assert key_in(headers(*sent)) == key


@pytest.mark.parametrize(
    ("sent", "body", "hint"),
    [
        ([("x-session-id", "c"), ("session-id", "b"), ("x-claude-code-session-id", "a")], None, "a"),
        ([("session-id", "not an id"), ("x-session-id", "c")], {"prompt_cache_key": "d"}, "c"),
        ([], {"metadata": {"user_id": '{"session_id": "d"}'}, "prompt_cache_key": "e"}, "d"),
        ([], {"metadata": {"user_id": "no JSON"}, "prompt_cache_key": "e"}, "e"),
        ([], {"metadata": "no object", "prompt_cache_key": 3}, None),
        ([], ["no object"], None),
    ],
)
def test_the_first_hint_that_can_be_an_id_counts(sent: list[tuple[str, str]], body: Any, hint: str | None) -> None:
    assert hint_in(headers(*sent), body) == hint
