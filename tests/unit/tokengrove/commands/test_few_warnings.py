"""Warnings of many episodes: one of each kind in a while, which tells how many there were."""

from __future__ import annotations

import logging

import pytest

from tokengrove.commands.agents_output import FewAlike, few_warnings


def test_of_many_warnings_alike_one_is_shown_in_a_while_and_counts_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = logging.getLogger("tokengrove.rollout.of_the_test")
    with few_warnings():
        for number in range(1000):
            logger.warning("server %d is away", number)
        logger.warning("something else")
    assert capsys.readouterr().err.splitlines() == ["server 0 is away", "something else"]


def test_the_next_line_that_is_shown_tells_how_many_were_left_out() -> None:
    now = [0.0]
    few = FewAlike(5.0, lambda: now[0])
    shown = []
    for now[0] in (0.0, 1.0, 4.9, 5.0, 10.0):
        record = logging.LogRecord("x", logging.WARNING, "", 0, "at %g", (now[0],), None)
        if few.filter(record):
            shown.append(record.getMessage())
    assert shown == ["at 0", "at 5 (and 2 more like it)", "at 10"]


def test_afterwards_warnings_go_where_they_went_before(caplog: pytest.LogCaptureFixture) -> None:
    with few_warnings():
        pass
    logging.getLogger("tokengrove.rollout.of_the_test").warning("as ever")
    assert caplog.messages == ["as ever"]
