"""One deployment's settings, table by table, checked before anything runs.

A setting that could lose or double something is refused here with its reason, so no other module has to
doubt what it gets.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from processor.settings import secrets, sources, strategies
from processor.settings.database import DatabaseSettings
from processor.settings.kafka import KafkaSettings
from processor.settings.table import Milliseconds, Table, Texts, refused


class RetrySettings(Table):
    """How often and how soon a message is tried again that failed for no fault of its own, or so it seems."""

    attempts: int = Field(default=5, ge=1, le=1000)
    first_delay_ms: Milliseconds = 200
    max_delay_ms: Milliseconds = Field(default=60_000, validate_default=True)

    @field_validator("max_delay_ms")
    @classmethod
    def _not_below_the_first(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("first_delay_ms", 0):
            raise ValueError("must be at least first_delay_ms")
        return value


class HandlerSettings(Table):
    call: str
    inbox: bool = True
    effect: bool = False
    timeout_ms: Milliseconds | None = None
    retry: RetrySettings | None = None
    outputs: Texts = ()  # topics that it sends to, as far as it says so: looked for before anything runs

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"call": value}
        if isinstance(value, dict) and "call" not in value:
            unknown = [str(key) for key in value if key not in cls.model_fields]
            if unknown and not difflib.get_close_matches(unknown[0], cls.model_fields):
                raise ValueError(f'has no call; a message type with a dot is written in quotes: "….{unknown[0]}"')
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
            raise ValueError("effect needs the inbox: without its row nobody would know that the call was made")
        return self


class MessageSettings(Table):
    id: Texts = ("header:message-id", "offset")
    type: Texts = ("header:type", "payload:/type")
    scope_by_type: bool = False
    window_seconds: Annotated[int, Field(gt=0)] | None = None
    on_collision: Literal["fail", "skip", "process"] = "fail"
    max_bytes: int = Field(default=1_048_576, gt=0)

    @field_validator("id")
    @classmethod
    def _id_strategies(cls, chain: tuple[str, ...]) -> tuple[str, ...]:
        valid = ("header:", "payload:/", "business:", "content-hash", "offset")
        return strategies.checked(chain, valid, always="offset")

    @field_validator("type")
    @classmethod
    def _type_strategies(cls, chain: tuple[str, ...]) -> tuple[str, ...]:
        return strategies.checked(chain, ("header:", "payload:/", "constant:"), always="constant:")


# What a profile stands for; each value can still be set by itself.
PROFILES: Mapping[str, Mapping[str, int]] = {
    "latency": {"max_messages": 200, "linger_ms": 0},
    "balanced": {"max_messages": 1000, "linger_ms": 20},
    "throughput": {"max_messages": 4000, "linger_ms": 200},
}


class BatchSettings(Table):
    max_messages: int = Field(default=PROFILES["balanced"]["max_messages"], gt=0, le=100_000)
    max_bytes: int = Field(default=4_194_304, gt=0)
    linger_ms: int = Field(default=PROFILES["balanced"]["linger_ms"], ge=0, le=60_000)
    buffer_bytes: int = Field(default=33_554_432, gt=0, validate_default=True)

    @field_validator("buffer_bytes")
    @classmethod
    def _holds_a_batch(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("max_bytes", 0):
            raise ValueError("must be at least batch.max_bytes, or a full batch could never be read")
        return value


Class = Literal["poison", "transient", "outage", "bug"]
SQLSTATE = re.compile(r"[0-9A-Z]{2,5}")


class FailureSettings(Table):
    """What becomes of a message that cannot be processed."""

    policy: Literal["dead-letter", "park-key", "halt"] = "dead-letter"
    dead_letter_topic: str = "{topic}.{consumer}.dlq"
    timeout_ms: Milliseconds = 60_000
    quarantine_after: int = Field(default=3, ge=2, le=100)
    budget_consecutive: int = Field(default=100, ge=1)
    budget_percent: int = Field(default=50, ge=1, le=100)
    budget_window: int = Field(default=1000, ge=10)
    classes: dict[str, Class] = Field(default={})

    @field_validator("dead_letter_topic")
    @classmethod
    def _is_a_pattern(cls, value: str) -> str:
        name = value.replace("{topic}", "t").replace("{consumer}", "c")
        if value and not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", name):
            raise ValueError('must be a topic name, in which {topic} and {consumer} may stand, or "" for rows only')
        if value == "{topic}":
            raise ValueError("must not be the input topic: what failed would come in again, and fail again, for ever")
        return value

    @field_validator("classes")
    @classmethod
    def _names_errors(cls, classes: dict[str, Class]) -> dict[str, Class]:
        named = {}
        for name, class_ in classes.items():
            state = name.upper()  # names of environment variables arrive in small letters
            if not SQLSTATE.fullmatch(state) and not re.fullmatch(r"[\w.]+:[\w.]+", name):
                raise ValueError(f'{name!r} must be a SQLSTATE or the beginning of one, or "module:Exception"')
            named[state if SQLSTATE.fullmatch(state) else name] = class_
        return named


class EffectSettings(Table):
    """For handlers that act on the world outside: how long one of them may be silent before it is taken for dead."""

    lease_ms: Milliseconds = 30_000
    reap_ms: Milliseconds = 5_000


class RunSettings(Table):
    stop_timeout_ms: Milliseconds = 25_000
    ready_file: Path | None = None


class Settings(BaseSettings):
    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    consumer: str
    topics: Texts
    handlers: Mapping[str, HandlerSettings]
    profile: Literal["latency", "balanced", "throughput"] = "balanced"
    concurrency: Annotated[int, Field(ge=1, le=1000)] = 1
    message: MessageSettings = MessageSettings()
    kafka: KafkaSettings
    database: DatabaseSettings
    batch: BatchSettings = BatchSettings()
    retry: RetrySettings = RetrySettings()
    failure: FailureSettings = FailureSettings()
    effects: EffectSettings = EffectSettings()
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
        # `load` reads file and environment itself: it must know which of the two a bad value came from.
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
                raise ValueError(f"{topic!r} is no topic name: 1 to 249 of the characters A-Z a-z 0-9 . _ -")
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

    def dead_letter_topic(self, topic: str) -> str | None:
        """Where failed messages of this topic go, besides their rows."""
        name = self.failure.dead_letter_topic
        return name.replace("{topic}", topic).replace("{consumer}", self.consumer) or None

    def describe(self) -> dict[str, Any]:
        """All settings as plain values, fit to be shown: every secret is `***`."""
        described = self.model_dump(mode="json", exclude={"source"})
        for name in sources.PROPERTY_TABLES:
            table = getattr(self.kafka, name)
            described["kafka"][name] = {key: secrets.hidden(value) for key, value in table.items()}
        described["database"]["url"] = secrets.hide_password(self.database.url.get_secret_value())
        described["database"]["password"] = secrets.hidden(self.database.password)
        described["database"]["tls"]["sslpassword"] = secrets.hidden(self.database.tls.sslpassword)
        return described

    def redact(self, text: str) -> str:
        """The text of a foreign error, with every secret we know of taken out."""
        properties = (value for name in sources.PROPERTY_TABLES for value in getattr(self.kafka, name).values())
        given = [*properties, self.database.password, self.database.tls.sslpassword]
        return secrets.redact(text, self.database.url.get_secret_value(), given)
