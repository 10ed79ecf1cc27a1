"""Whose fault an error is: every way in which an attempt at a batch can go wrong, and what follows from it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import asyncpg
import pytest

from processor.engine.failing.attribute import TRIES_IN_PLACE, attribute
from processor.engine.failing.classify import Judge
from processor.engine.failing.outcomes import Again, Culprit, Unattributed, Wait
from processor.errors import (
    BatchAborted,
    ConfigError,
    ConnectionLost,
    Fenced,
    Halt,
    ProcessorError,
    Reject,
    Retry,
    SetupError,
    Unavailable,
)
from processor.handling.errors import NotYet
from processor.handling.queue import QueuedWriteFailed
from processor.handling.timeouts import HandlerExit, HandlerTimedOut
from processor.postgres.sqlstates import StatementTimedOut
from tests.unit.engine.given import caused_by, in_handler, settings

INSERT = "INSERT INTO orders VALUES ($1)"


class Wallet(Exception):
    pass


def meaning(
    error: Exception, *, tries: int = 0, careful: Collection[str] = (), classes: dict[str, str] | None = None
) -> Any:
    judge = Judge(settings(failure={"classes": classes or {}}))
    return attribute(error, tries=tries, careful=careful, judge=judge)


def queued(cause: Exception, what: str = INSERT) -> QueuedWriteFailed:
    failed = QueuedWriteFailed(f"queued {what!r}: {cause}", what)
    failed.__cause__ = cause
    return failed


PASSING = [
    asyncpg.SerializationError("x"),
    asyncpg.DeadlockDetectedError("x"),
    asyncpg.LockNotAvailableError("x"),
    asyncpg.QueryCanceledError("x"),
    asyncpg.InvalidCachedStatementError("x"),
]
OUTAGES = [
    asyncpg.ReadOnlySQLTransactionError("x"),
    asyncpg.InsufficientResourcesError("x"),
    asyncpg.DiskFullError("x"),
    asyncpg.OutOfMemoryError("x"),
    asyncpg.TooManyConnectionsError("x"),
    asyncpg.PostgresIOError("x"),
]
ABOUT_DATA = [
    asyncpg.CardinalityViolationError("x"),
    asyncpg.NumericValueOutOfRangeError("x"),
    asyncpg.UniqueViolationError("x"),
    asyncpg.ForeignKeyViolationError("x"),
    asyncpg.CheckViolationError("x"),
    asyncpg.ProgramLimitExceededError("x"),
    asyncpg.DataError("x"),
    asyncpg.InterfaceError("x"),
]
# Of the deployment, of the connection, or of ours: no message can have caused these by what is in it.
NOT_ABOUT_DATA = [
    asyncpg.UndefinedTableError("x"),
    asyncpg.PostgresSyntaxError("x"),
    asyncpg.InsufficientPrivilegeError("x"),
    asyncpg.ConnectionDoesNotExistError("x"),
    OSError("x"),
    KeyError("x"),
]
# With these a handler says itself what its error means.
WORDS: list[type[Exception]] = [Reject, Retry, HandlerTimedOut]


def name_of(value: object) -> str | None:
    return type(value).__name__ if isinstance(value, Exception) else None


# --- what is nobody's business here ---


@pytest.mark.parametrize("tries", [0, TRIES_IN_PLACE, 100])
def test_message_that_cannot_be_handled_in_this_run_is_tried_again_however_often(tries: int) -> None:
    assert meaning(NotYet("orders:0:7: became free only now"), tries=tries) == Again("orders:0:7: became free only now")


@pytest.mark.parametrize("kind", [ConfigError, SetupError, Halt, BatchAborted, Fenced, ConnectionLost])
def test_error_of_ours_passes_through_wherever_it_came_from(kind: type[ProcessorError]) -> None:
    ours = kind("x")
    ours.__cause__ = asyncpg.DeadlockDetectedError("x")
    for error in (ours, in_handler(ours), in_handler(ours, 3)):
        assert meaning(error) is ours


# --- what passes by itself ---


@pytest.mark.parametrize("error", PASSING, ids=name_of)
@pytest.mark.parametrize("tries", [0, TRIES_IN_PLACE - 1, TRIES_IN_PLACE, 100])
def test_error_that_passes_is_tried_again_without_end_outside_a_handler(error: Exception, tries: int) -> None:
    assert meaning(error, tries=tries) == Again(f"{type(error).__name__}: x")


@pytest.mark.parametrize("error", [*PASSING, StatementTimedOut("x")], ids=name_of)
@pytest.mark.parametrize("index", [None, 0, 3])
def test_error_that_passes_in_a_handler_is_tried_in_place_and_then_somebody_is_looked_for(
    error: Exception, index: int | None
) -> None:
    raised = in_handler(error, index)
    again = Again(f"{type(error).__name__}: x")
    assert [meaning(raised, tries=tries) for tries in range(TRIES_IN_PLACE)] == [again] * TRIES_IN_PLACE
    to_blame = Unattributed(error) if index is None else Culprit(index, error)
    assert meaning(raised, tries=TRIES_IN_PLACE) == meaning(raised, tries=100) == to_blame


@pytest.mark.parametrize("index", [None, 3])
def test_error_that_passes_is_recognised_where_a_handler_has_wrapped_it(index: int | None) -> None:
    wrapped = caused_by(RuntimeError("could not reserve"), asyncpg.SerializationError("x"))
    assert meaning(in_handler(wrapped, index)) == Again("RuntimeError: could not reserve")
    unfinished = RuntimeError("while cleaning up")
    unfinished.__context__ = asyncpg.SerializationError("x")
    assert meaning(in_handler(unfinished, index)) == Again("RuntimeError: while cleaning up")


@pytest.mark.parametrize("cause", PASSING, ids=name_of)
@pytest.mark.parametrize("own", WORDS)
def test_handler_that_says_itself_what_the_error_means_is_believed_at_the_first_try(
    own: type[Exception], cause: Exception
) -> None:
    error = caused_by(own("x"), cause)
    assert meaning(in_handler(error)) == Unattributed(error)
    assert meaning(in_handler(error, 3)) == Culprit(3, error)


def test_configuration_that_names_an_exception_speaks_for_the_handler() -> None:
    error = caused_by(Wallet("x"), asyncpg.SerializationError("x"))
    assert meaning(in_handler(error, 3)) == Again("Wallet: x")
    named = {f"{__name__}:Wallet": "poison"}
    assert meaning(in_handler(error, 3), classes=named) == Culprit(3, error)
    assert meaning(in_handler(error), classes=named) == Unattributed(error)


def test_class_of_a_sqlstate_that_passes_counts_only_after_the_tries_in_place() -> None:
    error, classes = asyncpg.SerializationError("x"), {"40001": "outage"}
    assert meaning(in_handler(error), classes=classes) == Again("SerializationError: x")
    assert meaning(in_handler(error), tries=TRIES_IN_PLACE, classes=classes) == Wait("SerializationError: x")


def test_words_of_a_handler_mean_nothing_outside_one() -> None:
    error = caused_by(Retry("x"), asyncpg.SerializationError("x"))
    assert meaning(error, tries=100) == Again("Retry: x")


# --- who did it is known ---


@pytest.mark.parametrize(
    "error",
    [
        *(word("x") for word in [*WORDS, Unavailable, HandlerExit, TimeoutError]),
        *(KeyError("sku"), *OUTAGES, *ABOUT_DATA),
    ],
    ids=name_of,
)
@pytest.mark.parametrize("tries", [0, TRIES_IN_PLACE])
def test_message_whose_handler_failed_is_the_culprit(error: Exception, tries: int) -> None:
    """Whether it fails, or waits until an outage is over, is decided about this message alone."""
    assert meaning(in_handler(error, 0), tries=tries) == Culprit(0, error)


# --- outages ---


@pytest.mark.parametrize("error", OUTAGES, ids=name_of)
@pytest.mark.parametrize("tries", [0, TRIES_IN_PLACE, 100])
def test_outage_is_waited_for_and_nobody_is_looked_for(error: Exception, tries: int) -> None:
    wait = Wait(f"{type(error).__name__}: x")
    assert meaning(error, tries=tries) == wait
    assert meaning(in_handler(error), tries=tries) == wait
    assert meaning(in_handler(queued(error)), tries=tries).partitions is None


def test_batch_handler_that_says_that_what_it_needs_is_down_waits() -> None:
    error = caused_by(Unavailable("the gateway is down"), asyncpg.SerializationError("x"))
    assert meaning(in_handler(error)) == Wait("Unavailable: the gateway is down")


@pytest.mark.parametrize("name", ["23503", "23", f"{__name__}:Wallet"])
def test_configured_outage_is_one_in_a_handler_and_nowhere_else(name: str) -> None:
    error = caused_by(Wallet("x"), asyncpg.ForeignKeyViolationError("x"))
    assert meaning(in_handler(error), classes={name: "outage"}) == Wait("Wallet: x")
    assert meaning(error, classes={name: "outage"}) == Unattributed(error)
    assert meaning(in_handler(error)) == Unattributed(error)


@pytest.mark.parametrize("cause", OUTAGES, ids=name_of)
@pytest.mark.parametrize("own", WORDS)
def test_batch_handler_that_says_itself_what_the_error_means_waits_for_no_outage(
    own: type[Exception], cause: Exception
) -> None:
    """As it is with the handler of one message, whose word is judged when its message is blamed."""
    error = caused_by(own("x"), cause)
    assert meaning(in_handler(error)) == Unattributed(error)


def test_outage_that_the_configuration_takes_for_something_else_is_not_waited_for_in_a_handler() -> None:
    error = asyncpg.DiskFullError("x")
    assert meaning(in_handler(error), classes={"53": "bug"}) == Unattributed(error)
    assert meaning(in_handler(error), classes={"53200": "bug"}) == Wait("DiskFullError: x")
    assert meaning(error, classes={"53": "bug"}) == Wait("DiskFullError: x"), "no handler has met it"


# --- queued writes ---


@pytest.mark.parametrize("cause", [*ABOUT_DATA, *NOT_ABOUT_DATA], ids=name_of)
def test_refused_write_is_sent_with_care_first_and_then_its_message_is_looked_for(cause: Exception) -> None:
    error = queued(cause)
    first = meaning(in_handler(error), careful={"another statement"})
    assert (type(first), first.careful_with) == (Again, INSERT)
    assert meaning(in_handler(error), careful={"another statement", INSERT}) == Unattributed(error)


def test_refused_write_whose_message_is_known_needs_no_care() -> None:
    error = queued(asyncpg.UniqueViolationError("x"))
    assert meaning(in_handler(error, 2)) == Culprit(2, error)


def test_queued_write_that_met_what_passes_is_no_reason_for_care() -> None:
    error = queued(asyncpg.DeadlockDetectedError("x"))
    again = meaning(in_handler(error))
    assert (type(again), again.careful_with) == (Again, None)
    later = meaning(in_handler(error), tries=TRIES_IN_PLACE)
    assert (type(later), later.careful_with) == (Again, INSERT)


# --- somebody did it ---


@pytest.mark.parametrize(
    "error", [*(word("x") for word in WORDS), *ABOUT_DATA, *NOT_ABOUT_DATA, TimeoutError()], ids=name_of
)
@pytest.mark.parametrize("tries", [0, TRIES_IN_PLACE])
def test_message_behind_the_error_of_a_batch_handler_is_looked_for(error: Exception, tries: int) -> None:
    assert meaning(in_handler(error), tries=tries) == Unattributed(error)


@pytest.mark.parametrize("error", [*ABOUT_DATA, asyncpg.InFailedSQLTransactionError("x")], ids=name_of)
def test_message_behind_data_that_postgres_refuses_from_us_is_looked_for(error: Exception) -> None:
    assert meaning(error) == Unattributed(error)


@pytest.mark.parametrize("error", [*NOT_ABOUT_DATA, Reject("x"), Unavailable("x")], ids=name_of)
def test_error_that_no_message_can_have_caused_is_raised_as_it_is(error: Exception) -> None:
    assert meaning(error) is error


# --- what people read ---


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_error_without_a_text_of_its_own_is_still_attributed() -> None:
    error = caused_by(Mute(), asyncpg.DeadlockDetectedError("x"))
    assert meaning(in_handler(error, 1)) == Again("Mute: (no text: its __str__ raised RuntimeError)")
