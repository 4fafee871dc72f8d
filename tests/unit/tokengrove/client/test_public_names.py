"""`tokengrove` and `tokengrove.client` offer the same names, and type checkers read their types."""

from __future__ import annotations

from importlib.resources import files

import tokengrove
import tokengrove.client


def test_tokengrove_offers_every_public_name_of_the_client() -> None:
    assert tokengrove.__all__ == tokengrove.client.__all__
    assert all(getattr(tokengrove, name) is getattr(tokengrove.client, name) for name in tokengrove.__all__)


def test_the_package_says_that_it_is_typed() -> None:
    assert files("tokengrove").joinpath("py.typed").is_file()
