"""What an error means: Kafka's by code and flags, Postgres' by SQLSTATE, never by text."""

from __future__ import annotations

import random
from typing import Any

import asyncpg
import pytest
from confluent_kafka import KafkaError

from processor.engine.failing import classify
from processor.engine.failing.classify import Judge, Kind
from processor.errors import ConfigError, Reject, Retry, Unavailable
from processor.handling.timeouts import HandlerTimedOut
from processor.kafka.producer import ProducerAction, action_after
from processor.messages.record import Record
from processor.postgres import sqlstates
from processor.settings.schema import HandlerSettings
from tests.support.readings import reading
from tests.unit.engine.given import caused_by, records_of, settings


@pytest.mark.parametrize(
    ("code", "fatal", "retriable", "abortable", "verdict"),
    [
        (KafkaError._TIMED_OUT, False, True, False, ProducerAction.AGAIN),
        (KafkaError.COORDINATOR_LOAD_IN_PROGRESS, False, True, False, ProducerAction.AGAIN),
        (KafkaError.UNKNOWN_MEMBER_ID, False, False, True, ProducerAction.FENCED),
        (KafkaError.ILLEGAL_GENERATION, False, False, True, ProducerAction.OLD),
        (KafkaError.STALE_MEMBER_EPOCH, False, False, True, ProducerAction.OLD),
        (KafkaError._FENCED, True, False, False, ProducerAction.FENCED),
        (KafkaError.INVALID_PRODUCER_EPOCH, True, False, False, ProducerAction.FENCED),
        (KafkaError.NOT_ENOUGH_REPLICAS, False, False, True, ProducerAction.ABORT),
        (KafkaError._MSG_TIMED_OUT, False, False, True, ProducerAction.ABORT),
        (KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, True, False, False, ProducerAction.REBUILD),
        (KafkaError._STATE, False, False, False, ProducerAction.REBUILD),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, False, False, True, ProducerAction.HALT),
        (KafkaError.MSG_SIZE_TOO_LARGE, False, False, True, ProducerAction.HALT),
    ],
)
def test_kafka_error_asks_for_one_thing(
    code: int, fatal: bool, retriable: bool, abortable: bool, verdict: ProducerAction
) -> None:
    assert action_after(KafkaError(code, "any text", fatal, retriable, abortable)) is verdict


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (asyncpg.SerializationError("x"), True),
        (asyncpg.DeadlockDetectedError("x"), True),
        (asyncpg.LockNotAvailableError("x"), True),
        (asyncpg.QueryCanceledError("x"), True),
        (TimeoutError(), True),
        (asyncpg.UniqueViolationError("deadlock serialization failure"), False),
        (RuntimeError("deadlock detected"), False),
    ],
)
def test_postgres_error_is_transient_by_its_sqlstate(error: Exception, transient: bool) -> None:
    assert sqlstates.is_transient(error) is transient


def test_error_wrapped_by_a_handler_is_still_seen() -> None:
    wrapped = RuntimeError("could not reserve")
    wrapped.__cause__ = asyncpg.DeadlockDetectedError("x")
    assert sqlstates.is_transient(wrapped)
    assert sqlstates.is_transient(ExceptionGroup("several", [ValueError(), wrapped]))
    hidden = RuntimeError("while handling")
    hidden.__context__ = asyncpg.SerializationError("x")
    assert sqlstates.is_transient(hidden)


def test_a_statement_in_a_failed_transaction_blames_nobody() -> None:
    assert sqlstates.is_bystander(asyncpg.InFailedSQLTransactionError("x"))
    assert not sqlstates.is_bystander(ValueError("x"))


class Wallet(Exception):
    pass


class Empty(Wallet):
    pass


def judge(**classes: str) -> Judge:
    return Judge(settings(failure={"classes": classes}))


def judge_with_retries(**retry: int) -> Judge:
    return Judge(settings(retry=retry))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Reject("x"), Kind.POISON),
        (asyncpg.CheckViolationError("x"), Kind.POISON),
        (asyncpg.NotNullViolationError("x"), Kind.POISON),
        (asyncpg.NumericValueOutOfRangeError("x"), Kind.POISON),
        (asyncpg.DataError("x"), Kind.POISON),
        (Retry("x"), Kind.TRANSIENT),
        (HandlerTimedOut("x"), Kind.TRANSIENT),
        (asyncpg.SerializationError("x"), Kind.TRANSIENT),
        (TimeoutError(), Kind.TRANSIENT),
        (Unavailable("x"), Kind.OUTAGE),
        (asyncpg.TooManyConnectionsError("x"), Kind.OUTAGE),
        (asyncpg.ForeignKeyViolationError("x"), Kind.BUG),
        (asyncpg.UniqueViolationError("x"), Kind.BUG),
        (KeyError("sku"), Kind.BUG),
        (RuntimeError("deadlock detected"), Kind.BUG),
    ],
)
def test_errors_are_classed_by_type_and_sqlstate(error: Exception, kind: Kind) -> None:
    assert judge().kind(error) is kind


def test_the_configuration_has_the_first_say_and_the_longest_sqlstate_wins() -> None:
    name = f"{__name__}:Wallet"
    configured = judge(**{"23": "poison", "23503": "transient", name: "outage"})
    assert configured.kind(asyncpg.UniqueViolationError("x")) is Kind.POISON
    assert configured.kind(asyncpg.ForeignKeyViolationError("x")) is Kind.TRANSIENT
    assert configured.kind(Empty("a subclass")) is Kind.OUTAGE
    wrapped = RuntimeError("could not pay")
    wrapped.__cause__ = Empty("x")
    assert configured.kind(wrapped) is Kind.OUTAGE


def test_configured_exception_comes_before_a_configured_sqlstate_and_both_before_what_is_built_in() -> None:
    name = f"{__name__}:Wallet"
    error = caused_by(Empty("x"), asyncpg.DeadlockDetectedError("x"))
    assert judge().kind(error) is Kind.TRANSIENT
    assert judge(**{"40": "poison"}).kind(error) is Kind.POISON
    assert judge(**{"40P01": "poison", name: "bug"}).kind(error) is Kind.BUG
    assert judge(**{"40P01": "outage"}).kind(caused_by(Reject("x"), asyncpg.DeadlockDetectedError("x"))) is Kind.OUTAGE


def test_sqlstate_is_matched_by_its_beginning_and_never_by_more_than_that() -> None:
    error = asyncpg.ForeignKeyViolationError("x")  # 23503
    for beginning in ("23", "235", "2350", "23503"):
        assert judge(**{beginning: "outage"}).kind(error) is Kind.OUTAGE
    for other in ("22", "234", "23504", "03"):
        assert judge(**{other: "outage"}).kind(error) is Kind.BUG


def test_word_of_a_handler_counts_more_than_the_error_that_it_came_from() -> None:
    assert judge().kind(caused_by(Reject("x"), asyncpg.TooManyConnectionsError("x"))) is Kind.POISON
    assert judge().kind(caused_by(Retry("x"), asyncpg.CheckViolationError("x"))) is Kind.TRANSIENT
    assert judge().kind(caused_by(Unavailable("x"), asyncpg.CheckViolationError("x"))) is Kind.OUTAGE
    assert judge().kind(caused_by(RuntimeError("x"), Reject("x"))) is Kind.BUG, "it is an error of its own"


@pytest.mark.parametrize(
    ("error", "explicit"),
    [
        (Reject("x"), True),
        (Retry("x"), True),
        (Unavailable("x"), True),
        (HandlerTimedOut("x"), True),
        (Wallet("x"), True),
        (Empty("a subclass"), True),
        (asyncpg.DeadlockDetectedError("x"), False),
        (RuntimeError("x"), False),
    ],
)
def test_error_is_explicit_if_handler_or_configuration_name_its_type(error: Exception, explicit: bool) -> None:
    assert judge(**{f"{__name__}:Wallet": "bug", "40P01": "poison"}).is_explicit(error) is explicit


# --- failing for good, or being tried again ---


def record(attempts: int = 0) -> Record:
    (record,) = records_of(reading(), 0)
    record.attempts = attempts
    return record


@pytest.mark.parametrize(
    ("error", "last_attempt"),
    [
        (Reject("x"), 1),
        (asyncpg.CheckViolationError("x"), 1),
        (Retry("x"), 3),
        (KeyError("sku"), 3),
        (HandlerTimedOut("x"), 3),
        (asyncpg.DeadlockDetectedError("x"), 3),
        (Unavailable("x"), None),
        (asyncpg.DiskFullError("x"), None),
    ],
)
def test_message_fails_for_good_when_it_is_bad_or_out_of_attempts_and_never_by_an_outage(
    error: Exception, last_attempt: int | None
) -> None:
    judging = judge_with_retries(attempts=3)
    final = [attempt for attempt in range(1, 6) if judging.final_failure(record(attempt - 1), error) is not None]
    assert final == ([] if last_attempt is None else list(range(last_attempt, 6)))


def own_retries(**retry: int) -> Judge:
    """The type of the records has a table of its own, another type another one."""
    handlers: dict[str, Any] = {
        "T": HandlerSettings.model_validate({"call": "m:f", "retry": retry}),
        "U": HandlerSettings.model_validate({"call": "m:f", "retry": {"attempts": 1000}}),
    }
    return Judge(settings(handlers=handlers, retry={"attempts": 7, "first_delay_ms": 50}))


def test_type_with_retries_of_its_own_has_those_as_a_whole() -> None:
    judging = own_retries(attempts=2)
    assert judging.final_failure(record(0), Retry("x")) is None
    assert judging.final_failure(record(1), Retry("x")) is not None
    unhandled = record(5)
    unhandled.message_type = None
    assert judging.final_failure(unhandled, Retry("x")) is None
    unhandled.attempts = 6
    assert judging.final_failure(unhandled, Retry("x")) is not None


@pytest.fixture
def longest_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    def longest(least: float, most: float) -> float:
        assert least == 0
        return most

    monkeypatch.setattr(random, "uniform", longest)


@pytest.mark.usefixtures("longest_delays")
def test_limit_of_the_delay_doubles_with_each_attempt_up_to_a_bound() -> None:
    judging = judge_with_retries(first_delay_ms=200, max_delay_ms=1500)
    found = [judging.delay(record(attempts), KeyError("x")) for attempts in (0, 1, 2, 3, 4, 100_000)]
    assert found == [0.2, 0.4, 0.8, 1.5, 1.5, 1.5]


@pytest.mark.usefixtures("longest_delays")
def test_delay_of_a_type_with_retries_of_its_own_is_that_of_its_table() -> None:
    assert own_retries(first_delay_ms=10).delay(record(), KeyError("x")) == 0.01


@pytest.mark.parametrize(
    ("error", "delay"),
    [
        (Retry("x", after=2.5), 2.5),
        (Retry("x", after=3600), 3600),  # beyond retry.max_delay_ms
        (Retry("x", after=0), 0),
        (Retry("x", after=-1), 0),
        (Unavailable("x", after=7), 7),
    ],
)
def test_delay_that_a_handler_names_is_taken_as_it_is(error: Exception, delay: float) -> None:
    assert judge().delay(record(3), error) == delay


@pytest.mark.usefixtures("longest_delays")
def test_delay_is_the_configured_one_where_the_handler_names_none() -> None:
    odd = Wallet("x")
    odd.after = "soon"  # type: ignore[attr-defined]
    assert judge().delay(record(), odd) == judge().delay(record(), Retry("x")) == 0.2


# --- what is kept of a failure ---


@pytest.mark.parametrize("name", ["no_such_module:Error", f"{__name__}:judge", f"{__name__}:Missing"])
def test_a_class_for_what_is_no_exception_is_refused_at_start(name: str) -> None:
    with pytest.raises(ConfigError, match=r"failure\.classes: "):
        judge(**{name: "poison"})


def test_failure_of_a_message_says_why_in_a_form_that_can_be_stored() -> None:
    assert classify.failure_of(Reject("no such sku"), Kind.POISON).reason == "rejected"
    found = classify.failure_of(asyncpg.CheckViolationError("bad \udc80"), Kind.POISON)
    assert "SQLSTATE 23514" in found.detail
    assert (found.kind, found.sqlstate, found.exception) == ("poison", "23514", "CheckViolationError")
    found.detail.encode()


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("error", "kind", "reason", "way"),
    [
        (Reject("x"), Kind.POISON, "rejected", ("poison", "rejected", "Reject", None)),
        (Empty("x"), Kind.POISON, "handler_error", ("poison", "handler_error", "Empty", None)),
        (HandlerTimedOut("x"), Kind.TRANSIENT, "timed_out", ("transient", "timed_out", "HandlerTimedOut", None)),
        (
            caused_by(RuntimeError("x"), asyncpg.UniqueViolationError("y")),
            Kind.BUG,
            "handler_error",
            ("bug", "handler_error", "RuntimeError", "23505"),
        ),
    ],
)
def test_failure_names_its_reason_and_the_way_in_which_the_message_failed(
    error: Exception, kind: Kind, reason: str, way: tuple[str | None, ...]
) -> None:
    found = classify.failure_of(raised(error), kind)
    assert (found.reason, found.way) == (reason, way)
    assert "x" in found.detail


def test_rejection_needs_no_traceback_and_a_bug_has_the_end_of_its_own() -> None:
    assert classify.failure_of(raised(Reject("x")), Kind.POISON).traceback is None
    found = classify.failure_of(raised(KeyError("y" * 2 * classify.TRACEBACK_CHARS)), Kind.BUG)
    assert found.traceback is not None
    assert len(found.traceback) == classify.TRACEBACK_CHARS
    assert found.traceback.endswith("y'\n")


def test_quarantine_is_a_failure_of_its_own_kind_that_says_how_many_died() -> None:
    found = classify.quarantined(4)
    assert found.way == ("bug", "quarantined", None, None)
    assert found.detail.startswith("4 processes")


def test_backoff_grows_is_jittered_and_bounded() -> None:
    assert all(0 <= classify.backoff(50) <= classify.LONGEST_DELAY_SECONDS for _ in range(100))
    assert max(classify.backoff(1) for _ in range(100)) <= 2 * classify.FIRST_DELAY_SECONDS


@pytest.mark.usefixtures("longest_delays")
def test_limit_of_the_backoff_doubles_with_each_try_up_to_a_bound() -> None:
    found = [classify.backoff(tries) for tries in (0, 1, 2, 6, 7, 100_000)]
    assert found == [0.05, 0.1, 0.2, 3.2, 5.0, 5.0]


@pytest.mark.parametrize(
    ("after", "delay"), [(2, 2.0), (0.5, 0.5), (-1, 0.0), ("5", None), (None, None), (float("inf"), None), ([], None)]
)
def test_delay_counts_only_where_the_error_names_a_number(after: Any, delay: float | None) -> None:
    assert classify.named_delay(Unavailable("down", after=after)) == delay
    assert classify.named_delay(ValueError("names none")) is None
