"""What an error means: Kafka's by code and flags, Postgres' by SQLSTATE, never by text."""

from __future__ import annotations

import asyncpg
import pytest
from confluent_kafka import KafkaError
from pydantic import SecretStr

from processor.engine.failing import classify
from processor.engine.failing.classify import Judge, Kind
from processor.errors import ConfigError, Reject, Retry, Unavailable
from processor.handling.timeouts import HandlerTimedOut
from processor.kafka.producer import ProducerAction, action_after
from processor.postgres import sqlstates
from processor.settings.database import DatabaseSettings
from processor.settings.kafka import KafkaSettings
from processor.settings.schema import FailureSettings, HandlerSettings, Settings


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
    return Judge(
        Settings(
            consumer="c",
            topics=("t",),
            handlers={"T": HandlerSettings(call="m:f")},
            kafka=KafkaSettings(bootstrap_servers="x:1"),
            database=DatabaseSettings(url=SecretStr("postgresql://x")),
            failure=FailureSettings.model_validate({"classes": classes}),
        )
    )


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


def test_backoff_grows_is_jittered_and_bounded() -> None:
    assert all(0 <= classify.backoff(50) <= classify.LONGEST_DELAY_SECONDS for _ in range(100))
    assert max(classify.backoff(1) for _ in range(100)) <= 2 * classify.FIRST_DELAY_SECONDS
