"""What an error means: Kafka's by code and flags, Postgres' by SQLSTATE, never by text."""

from __future__ import annotations

import asyncpg
import pytest
from confluent_kafka import KafkaError

from processor import failures, postgres
from processor.failures import Reject, Retry
from processor.transaction import Verdict, classify


@pytest.mark.parametrize(
    ("code", "fatal", "retriable", "abortable", "verdict"),
    [
        (KafkaError._TIMED_OUT, False, True, False, Verdict.AGAIN),
        (KafkaError.COORDINATOR_LOAD_IN_PROGRESS, False, True, False, Verdict.AGAIN),
        (KafkaError.UNKNOWN_MEMBER_ID, False, False, True, Verdict.FENCED),
        (KafkaError.ILLEGAL_GENERATION, False, False, True, Verdict.FENCED),
        (KafkaError.STALE_MEMBER_EPOCH, False, False, True, Verdict.FENCED),
        (KafkaError._FENCED, True, False, False, Verdict.FENCED),
        (KafkaError.INVALID_PRODUCER_EPOCH, True, False, False, Verdict.FENCED),
        (KafkaError.NOT_ENOUGH_REPLICAS, False, False, True, Verdict.ABORT),
        (KafkaError._MSG_TIMED_OUT, False, False, True, Verdict.ABORT),
        (KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, True, False, False, Verdict.REBUILD),
        (KafkaError._STATE, False, False, False, Verdict.REBUILD),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, False, False, True, Verdict.HALT),
        (KafkaError.MSG_SIZE_TOO_LARGE, False, False, True, Verdict.HALT),
    ],
)
def test_kafka_error_asks_for_one_thing(
    code: int, fatal: bool, retriable: bool, abortable: bool, verdict: Verdict
) -> None:
    assert classify(KafkaError(code, "any text", fatal, retriable, abortable)) is verdict


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
    assert postgres.is_transient(error) is transient
    assert failures.blames_the_message(error) is not transient


def test_error_wrapped_by_a_handler_is_still_seen() -> None:
    wrapped = RuntimeError("could not reserve")
    wrapped.__cause__ = asyncpg.DeadlockDetectedError("x")
    assert postgres.is_transient(wrapped)
    assert postgres.is_transient(ExceptionGroup("several", [ValueError(), wrapped]))
    hidden = RuntimeError("while handling")
    hidden.__context__ = asyncpg.SerializationError("x")
    assert postgres.is_transient(hidden)


def test_bystanders_are_not_blamed() -> None:
    assert not failures.blames_the_message(asyncpg.InFailedSQLTransactionError("x"))
    assert failures.blames_the_message(ValueError("x"))


def test_failure_of_a_message_says_why_in_a_form_that_can_be_stored() -> None:
    assert failures.failure_of(Reject("no such sku")).reason == "rejected"
    found = failures.failure_of(asyncpg.CheckViolationError("bad \udc80"))
    assert "SQLSTATE 23514" in found.detail
    found.detail.encode()


def test_backoff_grows_is_jittered_and_bounded_and_a_handler_may_name_its_own() -> None:
    assert failures.backoff(1, after=0.25) == 0.25
    assert all(0 <= failures.backoff(50) <= failures.LONGEST_DELAY_SECONDS for _ in range(100))
    assert max(failures.backoff(1) for _ in range(100)) <= 2 * failures.FIRST_DELAY_SECONDS
    assert Retry(after=3).after == 3
