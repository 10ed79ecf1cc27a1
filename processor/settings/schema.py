"""One deployment's settings, table by table, checked before anything runs.

A setting that could lose or double something is refused here with its reason, so no other module has to
doubt what it gets.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from processor.settings import secrets, sources, strategies
from processor.settings.database import DatabaseSettings
from processor.settings.kafka import KafkaSettings
from processor.settings.retention import RetentionSettings
from processor.settings.table import Milliseconds, Table, Texts, refused


class RetrySettings(Table):
    """How often, and after which delays, a message is tried again after a transient failure or a bug."""

    attempts: int = Field(
        default=5,
        ge=1,
        le=1000,
        description="Attempts in all, the first one included. A message type may have a `retry` table of its own.",
    )
    first_delay_ms: Milliseconds = Field(
        default=200,
        description="Upper limit of the first delay; it doubles with each attempt. "
        "A delay is random, between 0 and its limit.",
    )
    max_delay_ms: Milliseconds = Field(
        default=60_000,
        validate_default=True,
        description="The limit of a delay grows no further than this. A handler's `Retry(after=…)` is taken as it is.",
    )

    @field_validator("max_delay_ms")
    @classmethod
    def _not_below_the_first(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("first_delay_ms", 0):
            raise ValueError("must be at least first_delay_ms")
        return value


class HandlerSettings(Table):
    """Which function handles which message type; the type `*` stands for all that are not named.

    A bare string, as in `OrderPlaced = "shop:invoice"`, is short for `{ call = "shop:invoice" }`.
    """

    call: str = Field(description="The handler, as `module:function`.")
    inbox: bool = Field(
        default=True,
        description="`false`: no inbox row, so a repeated message runs the handler again. "
        "Only for handlers that may do the same twice.",
    )
    effect: bool = Field(
        default=False,
        description="`true`: the handler acts on another system. It runs outside the transaction, under a lease; see "
        "[effects](failures.md#effects-outside).",
    )
    timeout_ms: Milliseconds | None = Field(
        default=None, description="Takes the place of `failure.timeout_ms` for this type."
    )
    retry: RetrySettings | None = Field(
        default=None, description="A table that takes the place of `[retry]` for this type, as a whole."
    )
    outputs: Texts = Field(
        default=(),
        description="Topics that the handler sends to. They must exist: `check --connect` and the start of `run` look "
        "for them.",
    )

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"call": value}
        if isinstance(value, dict) and "call" not in value:
            unknown = [str(key) for key in value if key not in cls.model_fields]
            if unknown and not difflib.get_close_matches(unknown[0], cls.model_fields):
                raise ValueError(f'has no call; put a message type that contains a dot in quotes: "….{unknown[0]}"')
        return value

    @field_validator("call")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
            raise ValueError('must name a function as "module:function"')
        return value

    @model_validator(mode="after")
    def _effects_need_the_inbox(self) -> HandlerSettings:
        if self.effect and not self.inbox:
            raise ValueError("effect needs the inbox: without a row there, nothing records that the call was made")
        return self


class MessageSettings(Table):
    """How a message is recognised, and which handler it is for."""

    id: Texts = Field(
        default=("header:message-id", "offset"),
        description="What makes two records the same message; the first strategy that yields an id wins: "
        "`header:NAME`, `payload:/json/pointer`, `business:order:{order_id}`, `content-hash`, `offset`. "
        "An id by `offset` includes the topic's id, so a topic that is created anew has other messages.",
    )
    type: Texts = Field(
        default=("header:type", "payload:/type"),
        description="Which handler a record is for; the first strategy that yields a type wins: "
        "`header:NAME`, `payload:/json/pointer`, `constant:NAME`.",
    )
    scope_by_type: bool = Field(default=False, description="`true`: the same id under two types is two messages.")
    window_seconds: Annotated[int, Field(gt=0)] | None = Field(
        default=None,
        description="An id is recognised only within a window of this length, by the records' timestamps. "
        "Without a window it is recognised for good.",
    )
    on_collision: Literal["fail", "skip", "process"] = Field(
        default="fail",
        description="What becomes of a message that has the id of an earlier one but another payload, whatever became "
        "of the earlier one: `fail` it, `skip` it and log that, or `process` it as a message of its own.",
    )
    max_bytes: int = Field(default=1_048_576, gt=0, description="A larger value fails without reaching its handler.")

    @field_validator("id")
    @classmethod
    def _id_strategies(cls, chain: tuple[str, ...]) -> tuple[str, ...]:
        valid = ("header:", "payload:/", "business:", "content-hash", "offset")
        return strategies.checked(chain, valid, always="offset")

    @field_validator("type")
    @classmethod
    def _type_strategies(cls, chain: tuple[str, ...]) -> tuple[str, ...]:
        return strategies.checked(chain, ("header:", "payload:/", "constant:"), always="constant:")


# What a profile sets, unless a value is set by itself.
PROFILES: Mapping[str, Mapping[str, int]] = {
    "latency": {"max_messages": 200, "linger_ms": 0},
    "balanced": {"max_messages": 1000, "linger_ms": 20},
    "throughput": {"max_messages": 4000, "linger_ms": 200},
}


def _by_profile(key: str) -> str:
    return ", ".join(f"`{name}` {values[key]:,}" for name, values in PROFILES.items())


class BatchSettings(Table):
    """How large batches get, and how long they wait for more."""

    max_messages: int = Field(
        default=PROFILES["balanced"]["max_messages"],
        gt=0,
        le=100_000,
        description=f"A batch ends at this many messages or at `max_bytes`. By profile: {_by_profile('max_messages')}.",
    )
    max_bytes: int = Field(default=4_194_304, gt=0, description="A batch ends at this size or at `max_messages`.")
    linger_ms: int = Field(
        default=PROFILES["balanced"]["linger_ms"],
        ge=0,
        le=60_000,
        description="Under a backlog, how long a batch waits until it is full, and a Kafka transaction for more "
        f"batches. By profile: {_by_profile('linger_ms')}.",
    )
    buffer_bytes: int = Field(
        default=33_554_432,
        gt=0,
        validate_default=True,
        description="Upper limit of the records that a process has read ahead; at least `max_bytes`.",
    )

    @field_validator("buffer_bytes")
    @classmethod
    def _holds_a_batch(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("max_bytes", 0):
            raise ValueError("must be at least batch.max_bytes, or a full batch would not fit")
        return value


Class = Literal["poison", "transient", "outage", "bug"]
SQLSTATE = re.compile(r"[0-9A-Z]{2,5}")


class FailureSettings(Table):
    """What becomes of a message that cannot be processed: [failures](failures.md)."""

    policy: Literal["dead-letter", "park-key", "halt"] = Field(
        default="dead-letter",
        description="After the last attempt: `dead-letter` puts the message aside and goes on; `park-key` also makes "
        "later messages of its key wait; `halt` stops the partition.",
    )
    dead_letter_topic: str = Field(
        default="{topic}.{consumer}.dlq",
        description='Must exist. `""` keeps failed messages as inbox rows only.',
    )
    timeout_ms: Milliseconds = Field(
        default=60_000, description="A handler that takes longer for one message is cancelled; a transient failure."
    )
    quarantine_after: int = Field(
        default=3,
        ge=2,
        le=100,
        description="A message that was being handled when this many processes died is failed without being handled "
        "again.",
    )
    budget_consecutive: int = Field(
        default=100, ge=1, description="More failed messages than this in a row halt their partition."
    )
    budget_percent: int = Field(
        default=50,
        ge=1,
        le=100,
        description="A larger percentage of failures among the last `budget_window` messages halts their partition.",
    )
    budget_window: int = Field(default=1000, ge=10, description="How many messages `budget_percent` looks at.")
    classes: dict[str, Class] = Field(
        default={},
        description='What errors mean here: `"23505" = "poison"` by SQLSTATE or the beginning of one, '
        '`"httpx:ConnectError" = "outage"` by exception, subclasses included. The classes are `poison`, `transient`, '
        "`outage` and `bug`.",
    )

    @field_validator("dead_letter_topic")
    @classmethod
    def _is_a_pattern(cls, value: str) -> str:
        name = value.replace("{topic}", "t").replace("{consumer}", "c")
        if value and not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", name):
            raise ValueError('must be a topic name, which may contain {topic} and {consumer}, or "" for rows only')
        if value == "{topic}":
            raise ValueError("must not be the input topic: a failed message would come in and fail again, for ever")
        return value

    @field_validator("classes")
    @classmethod
    def _names_errors(cls, classes: dict[str, Class]) -> dict[str, Class]:
        named = {}
        for name, class_ in classes.items():
            state = name.upper()  # keys from the environment arrive in lower case
            if not SQLSTATE.fullmatch(state) and not re.fullmatch(r"[\w.]+:[\w.]+", name):
                raise ValueError(f'{name!r} must be a SQLSTATE or the beginning of one, or "module:Exception"')
            named[state if SQLSTATE.fullmatch(state) else name] = class_
        return named


class EffectSettings(Table):
    """For handlers with `effect = true`."""

    lease_ms: Milliseconds = Field(
        default=30_000,
        description="An effect whose process has not renewed its lease for this long is given to another process.",
    )
    reap_ms: Milliseconds = Field(default=5_000, description="How often to look for effects whose lease has run out.")


class RunSettings(Table):
    """The process: how it stops, and how it shows that it is ready."""

    stop_timeout_ms: Milliseconds = Field(
        default=25_000, description="After SIGTERM, how long the current batches may take before they are rolled back."
    )
    ready_file: Path | None = Field(
        default=None,
        description="A file that exists while the process, with `--workers` all of them, is ready, and not during an "
        "outage.",
    )


class Settings(BaseSettings):
    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    consumer: str = Field(
        description="Scope of the inbox, Kafka group, and prefix of transactional ids. Never reuse or rename it."
    )
    topics: Texts = Field(description='The topics to read; a single one may be written `topic = "orders"`.')
    handlers: Mapping[str, HandlerSettings]
    profile: Literal["latency", "balanced", "throughput"] = Field(
        default="balanced",
        description="`latency`, `balanced` or `throughput`: sets `batch.max_messages` and `batch.linger_ms`, unless "
        "they are set themselves.",
    )
    concurrency: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=1,
        description="How many per-message handlers run at the same time, for handlers that wait for something. The "
        "messages of one key are still handled in order.",
    )
    message: MessageSettings = MessageSettings()
    kafka: KafkaSettings
    database: DatabaseSettings
    batch: BatchSettings = BatchSettings()
    retry: RetrySettings = RetrySettings()
    failure: FailureSettings = FailureSettings()
    effects: EffectSettings = EffectSettings()
    retention: RetentionSettings = RetentionSettings()
    run: RunSettings = RunSettings()
    source: str = ""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `load` reads file and environment itself, because it must know which of the two a bad value came from.
        return (init_settings,)

    @field_validator("consumer")
    @classmethod
    def _names_the_group(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", value):
            raise ValueError("must be 1 to 100 of the characters A-Z a-z 0-9 . _ -")
        return value

    @field_validator("topics")
    @classmethod
    def _are_topic_names(cls, topics: tuple[str, ...]) -> tuple[str, ...]:
        if not topics:
            raise ValueError("names no topic")
        for topic in topics:
            if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", topic) or topic in (".", ".."):
                raise ValueError(f"{topic!r} is not a topic name: 1 to 249 of the characters A-Z a-z 0-9 . _ -")
        if len(set(topics)) < len(topics):
            raise ValueError("names a topic twice")
        return topics

    @field_validator("handlers")
    @classmethod
    def _has_handlers(cls, handlers: Mapping[str, HandlerSettings]) -> Mapping[str, HandlerSettings]:
        if not handlers:
            raise ValueError('names no handler; add a line such as OrderPlaced = "module:function"')
        return handlers

    @model_validator(mode="after")
    def _dead_letters_go_elsewhere(self) -> Settings:
        for topic in self.topics:
            name = self.dead_letter_topic(topic)
            if name in self.topics:
                raise refused([("failure.dead_letter_topic", f"{name} is read by this consumer: an endless loop")])
            if name is not None and len(name) > 249:
                reason = f"{name[:40]}… has {len(name)} characters, 249 at most"
                raise refused([("failure.dead_letter_topic", reason)])
        return self

    @model_validator(mode="after")
    def _ids_outlive_their_window(self) -> Settings:
        window, span = self.message.window_seconds, self.retention.span
        if window is not None and span is not None and span < timedelta(seconds=window):
            key = "days" if self.retention.hours is None else "hours"
            reason = f"is shorter than message.window_seconds ({window}): an id has to be known as long as its window"
            raise refused([(f"retention.{key}", reason)])
        return self

    def dead_letter_topic(self, topic: str) -> str | None:
        """The topic that gets a copy of this topic's failed messages, or None."""
        name = self.failure.dead_letter_topic
        return name.replace("{topic}", topic).replace("{consumer}", self.consumer) or None

    def describe(self) -> dict[str, Any]:
        """All settings as plain values, with `***` for every secret."""
        described = self.model_dump(mode="json", exclude={"source"})
        for name in sources.PROPERTY_TABLES:
            table = getattr(self.kafka, name)
            described["kafka"][name] = {key: secrets.hidden(value) for key, value in table.items()}
        described["database"]["url"] = secrets.hide_password(self.database.url.get_secret_value())
        described["database"]["password"] = secrets.hidden(self.database.password)
        described["database"]["tls"]["sslpassword"] = secrets.hidden(self.database.tls.sslpassword)
        return described

    def redact(self, text: str) -> str:
        """The text of an error that is not ours, without the secrets in these settings."""
        properties = (value for name in sources.PROPERTY_TABLES for value in getattr(self.kafka, name).values())
        given = [*properties, self.database.password, self.database.tls.sslpassword]
        return secrets.redact(text, self.database.url.get_secret_value(), given)
