"""What is told of episodes that fail, and after how many in a row a run ends."""

from __future__ import annotations

import logging
import pickle
import threading
from typing import Any

import pytest

from tokengrove.errors import InvalidRequest
from tokengrove.rollout.failure_log import FailedEpisode, FailureLog, TooManyFailedEpisodes
from tokengrove.rollout.failures import AgentFailed


def failed(kind: str = "ValueError", session: str | None = "s-1", message: str = "no luck") -> FailedEpisode:
    return FailedEpisode(kind, message, "t-1", session)


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_the_first_of_a_type_is_a_warning_with_message_task_session_and_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    FailureLog().note(FailedEpisode.by(raised(ValueError("100 % wrong\nin two lines")), "t-1", "s-1"))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in ("ValueError", "100 % wrong\nin two lines", "task t-1", "session s-1", "Traceback", "in raised"):
        assert part in record.getMessage()


def test_further_ones_are_counted_in_few_lines_and_another_type_is_told_whole(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog(-1)
    for number in range(1000):
        log.note(failed(session=f"s-{number}"))
    assert len(caplog.records) == 10
    assert "512 times by now, last task t-1, session s-511: no luck" in caplog.records[-1].getMessage()
    log.note(failed("KeyError"))
    assert "KeyError: no luck (task t-1, session s-1)" in caplog.records[-1].getMessage()
    assert (log.episodes, log.total, log.counts) == (1001, 1001, {"ValueError": 1000, "KeyError": 1})


def test_the_lines_of_threads_come_in_the_order_of_their_counts() -> None:
    log, lines, begun = FailureLog(-1), list[str](), threading.Event()

    def note() -> None:
        begun.set()
        log.note(failed())

    other = threading.Thread(target=note)

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not begun.is_set():  # the first line: another thread notes a failure before it is written
                other.start()
                begun.wait()
                other.join(0.1)
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("tokengrove.rollout.failure_log"), Slow()
    handler.createLock = lambda: None  # type: ignore[method-assign]
    handler.lock = None
    logger.addHandler(handler)
    try:
        log.note(failed())
        other.join()
    finally:
        logger.removeHandler(handler)
    assert ["2 times by now" in line for line in lines] == [False, True]


def test_so_many_in_a_row_end_the_run_with_the_types_their_numbers_and_examples() -> None:
    log = FailureLog(3)
    log.note(failed("KeyError"))
    log.note(failed(session="s-2"))
    with pytest.raises(TooManyFailedEpisodes) as caught:
        log.note(failed(session="s-3"))
    assert caught.value.counts == {"KeyError": 1, "ValueError": 2}
    assert str(caught.value) == (
        "3 episodes in a row have failed (max_failed_episodes is 3): 2 x ValueError, such as task t-1, session s-2: no "
        "luck; 1 x KeyError, such as task t-1, session s-1: no luck"
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_one_that_goes_well_begins_the_count_anew() -> None:
    log = FailureLog(2)
    for _ in range(3):
        log.note(failed())
        log.note(None)
    log.note(failed())
    with pytest.raises(TooManyFailedEpisodes, match="2 episodes in a row"):
        log.note(failed())
    assert (log.episodes, log.total) == (8, 5)


@pytest.mark.parametrize(("group_size", "most"), [(1, 3), (4, 12)])
def test_three_groups_worth_is_the_default(group_size: int, most: int) -> None:
    log = FailureLog(None, group_size)
    for _ in range(most - 1):
        log.note(failed())
    with pytest.raises(TooManyFailedEpisodes):
        log.note(failed())


@pytest.mark.parametrize("most", [0, -2, True, "3", 1.5])
def test_another_number_is_refused_by_name(most: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"max_failed_episodes is .*-1 for no limit") as caught:
        FailureLog(most)
    assert caught.value.param == "max_failed_episodes"


def test_no_key_of_a_session_is_in_a_failure() -> None:
    told = FailedEpisode.by(raised(OSError("http://h/~s3cret/v1 does not answer")), "t-1")
    assert "s3cret" not in told.message + told.traceback and "http://h/~..." in told.message


def test_an_error_of_another_process_keeps_its_type_and_traceback() -> None:
    told = FailedEpisode.by(AgentFailed("m.Oops", "no", "Traceback there"), "t-1")
    assert (told.type, told.message, told.traceback) == ("m.Oops", "no", "Traceback there")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_exception_without_a_text_is_a_failure_like_others() -> None:
    told = FailedEpisode.by(raised(Unspeakable()), "t-1")
    assert told.type == "Unspeakable" and "its text cannot be made" in told.message
