"""One deployment's settings: `config/*.toml`, overridden by the environment, checked before anything runs.

A setting that could lose or double something is refused here with its reason, so no other module has to
doubt what it gets. Every problem is one line, `file: key: what is wrong`, and never repeats a value that
could be a secret.
"""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit, urlunsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from processor.errors import ConfigError
from processor.settings import librdkafka, sources
from processor.settings.sources import PREFIX, Problem

HIDDEN = "***"
Property = str | int | float | bool | SecretStr
# A member hears of a rebalance with its next heartbeat, and partitions that move to it lie idle until then.
HEARTBEAT_MS = 250
# What a server must be: any other value of target_session_attrs could lead to one that takes no writes.
WRITABLE = ["read-write", "primary"]
Milliseconds = Annotated[int, Field(gt=0, le=24 * 60 * 60 * 1000)]


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RetrySettings(_Table):
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


class HandlerSettings(_Table):
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


class MessageSettings(_Table):
    id: Texts = ("header:message-id", "offset")
    type: Texts = ("header:type", "payload:/type")
    scope_by_type: bool = False
    window_seconds: Annotated[int, Field(gt=0)] | None = None
    on_collision: Literal["fail", "skip", "process"] = "fail"
    max_bytes: int = Field(default=1_048_576, gt=0)

    @field_validator("id")
    @classmethod
    def _id_strategies(cls, chain: tuple[str, ...]) -> tuple[str, ...]:
        return _checked_chain(chain, ("header:", "payload:/", "business:", "content-hash", "offset"), always="offset")

    @field_validator("type")
    @classmethod
    def _type_strategies(cls, chain: tuple[str, ...]) -> tuple[str, ...]:
        return _checked_chain(chain, ("header:", "payload:/", "constant:"), always="constant:")


class KafkaSettings(_Table):
    bootstrap_servers: str = Field(min_length=1)
    start: Literal["earliest", "latest", "fail"] = "earliest"
    on_database_behind: Literal["halt", "reapply"] = "halt"
    group_protocol: Literal["classic", "consumer"] = "classic"
    session_timeout_ms: Milliseconds = 10_000
    static_membership: bool = False
    transaction_timeout_ms: int = Field(default=15_000, ge=1_000, le=900_000)
    revoke_timeout_ms: Milliseconds = 5_000
    client: dict[str, Property] = {}
    consumer: dict[str, Property] = {}
    producer: dict[str, Property] = {}

    @field_validator("session_timeout_ms")
    @classmethod
    def _decided_by_the_broker(cls, value: int, info: ValidationInfo) -> int:
        if info.data.get("group_protocol") == "consumer":
            raise ValueError(
                "cannot be set with group_protocol = consumer: the broker decides (group.consumer.session.timeout.ms)"
            )
        return value

    @field_validator("static_membership")
    @classmethod
    def _of_the_classic_protocol(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("group_protocol") == "consumer":
            raise ValueError("needs group_protocol = classic")
        return value

    @field_validator("client", "consumer", "producer", mode="before")
    @classmethod
    def _properties(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError("must be a table of librdkafka properties")  # noqa: TRY004 - pydantic's protocol
        table: Any = info.field_name
        properties: dict[str, Property] = {}
        refused: list[tuple[str, str]] = []
        for name, item in sources.flatten(value):
            if item is None:  # its secret file could not be read, which is reported already
                continue
            if not isinstance(item, (str, int, float, SecretStr)):
                refused.append((name, "must be a string, a number or a boolean"))
            elif reason := librdkafka.refusal(table, name, item):
                refused.append((name, reason))
            else:
                properties[name] = SecretStr(str(item)) if _hides(name, item) else item
        if refused:
            summary = "; ".join(f"{name} {reason}" for name, reason in refused)
            raise PydanticCustomError("properties", "{summary}", {"summary": summary, "refused": refused})
        return properties

    @property
    def heartbeat_seconds(self) -> float:
        """How often a member of a group with the classic protocol asks whether something has changed."""
        own = {**self.client, **self.consumer}.get("heartbeat.interval.ms")
        return (self._heartbeat_ms if own is None else int(str(own))) / 1000

    @property
    def _heartbeat_ms(self) -> int:
        return min(HEARTBEAT_MS, self.session_timeout_ms // 3)

    def consumer_config(self, consumer: str, instance: str | None = None) -> dict[str, Any]:
        """Everything confluent_kafka.Consumer is given; with the name of an `instance` it is a static member."""
        fixed: dict[str, Any] = {
            "group.id": consumer,
            "group.protocol": self.group_protocol,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
        }
        if self.group_protocol == "classic":
            fixed["partition.assignment.strategy"] = "cooperative-sticky"
            fixed["session.timeout.ms"] = self.session_timeout_ms
        if instance is not None:
            fixed["group.instance.id"] = instance
        defaults: dict[str, Any] = {
            "client.id": consumer,
            "queued.max.messages.kbytes": 16_384,
            # A full queue is asked about again after this; librdkafka's own second limits large messages to 30 MB/s.
            "fetch.queue.backoff.ms": 50,
            # A partition that is read again, as after a wait, has its turn when the broker has answered what was asked
            # before. That takes it this long while nothing comes in, by default half a second.
            "fetch.wait.max.ms": 100,
        }
        if self.group_protocol == "classic":
            defaults["heartbeat.interval.ms"] = self._heartbeat_ms
        return self._config("consumer", defaults, fixed)

    def producer_config(self, transactional_id: str) -> dict[str, Any]:
        """Everything confluent_kafka.Producer is given."""
        fixed = {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": self.transaction_timeout_ms,
            "enable.idempotence": True,
            "acks": "all",
            # With the default, librdkafka 2.16 never returns from send_offsets_to_transaction when the last known
            # broker dies during the call, whatever its time-out.
            "metadata.recovery.strategy": "none",
        }
        defaults = {
            "client.id": transactional_id,
            "linger.ms": 100,  # nothing waits for it: committing a transaction flushes at once
            "delivery.report.only.error": True,
            # A transaction right behind another one is refused until the broker has put that one's markers in place,
            # which takes it a few milliseconds. librdkafka's own 100 would be waited for with every batch.
            "retry.backoff.ms": 2,
            "compression.type": "lz4",  # outputs of a batch are alike; the broker has less to look at too
        }
        return self._config("producer", defaults, fixed)

    def admin_config(self) -> dict[str, Any]:
        """Everything an AdminClient is given: how to connect, nothing about reading or writing."""
        shared = {
            name: _revealed(value)
            for name, value in self.client.items()
            if librdkafka.applies(name, "consumer") and librdkafka.applies(name, "producer")
        }
        return {"client.id": "processor-admin", **shared, "bootstrap.servers": self.bootstrap_servers}

    def _config(
        self, role: Literal["consumer", "producer"], defaults: dict[str, Any], fixed: dict[str, Any]
    ) -> dict[str, Any]:
        own = self.consumer if role == "consumer" else self.producer
        given = {name: value for name, value in self.client.items() if librdkafka.applies(name, role)}
        overridden = {librdkafka.canonical(name) for name in own}
        given = {name: value for name, value in given.items() if librdkafka.canonical(name) not in overridden}
        given |= own
        taken = {librdkafka.canonical(name) for name in given}
        config = {name: value for name, value in defaults.items() if librdkafka.canonical(name) not in taken}
        for name, value in given.items():
            if librdkafka.canonical(name) not in librdkafka.MANAGED:
                config[name] = _revealed(value)
        return {**config, "bootstrap.servers": self.bootstrap_servers, **fixed}


class TlsSettings(_Table):
    """Named as libpq and asyncpg name them; the same names work in the URL's query."""

    sslmode: Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"] | None = None
    sslnegotiation: Literal["postgres", "direct"] | None = None
    sslrootcert: str | None = None
    sslcert: str | None = None
    sslkey: str | None = None
    sslpassword: SecretStr | None = None
    sslcrl: str | None = None
    ssl_min_protocol_version: str | None = None
    ssl_max_protocol_version: str | None = None

    @field_validator("sslrootcert", "sslcert", "sslkey", "sslcrl")
    @classmethod
    def _is_a_file(cls, value: str | None) -> str | None:
        if value is not None and not Path(value).is_file():
            raise ValueError(f"{value}: no such file")
        return value


# BaseModel has a method of that name, long out of use; here it is the word that everybody looks for.
warnings.filterwarnings("ignore", 'Field name "schema"', UserWarning)


class DatabaseSettings(_Table):
    url: SecretStr
    password: SecretStr | None = None
    schema: str | None = None  # type: ignore[assignment]
    tls: TlsSettings = TlsSettings()
    settings: dict[str, str] = {}
    idle_in_transaction_timeout_ms: Milliseconds = 30_000
    connect_timeout_ms: Milliseconds = 10_000
    command_timeout_ms: Milliseconds = 60_000
    migrations: tuple[Path, ...] = ()

    @property
    def idle_seconds(self) -> float:
        """How long a transaction is left idle at most: well below what Postgres allows."""
        return self.idle_in_transaction_timeout_ms / 3000

    @field_validator("url")
    @classmethod
    def _is_a_postgres_url(cls, url: SecretStr) -> SecretStr:
        try:
            parts = urlsplit(url.get_secret_value())
        except ValueError:
            raise ValueError("is not a URL; percent-encode special characters in the password") from None
        if parts.scheme not in ("postgres", "postgresql") or "://" not in url.get_secret_value():
            raise ValueError("must start with postgresql:// or postgres://")
        for host in parts.netloc.rpartition("@")[2].split(","):
            port = re.sub(r"^\[[^]]*]", "", host).partition(":")[2]
            if port and not port.isdecimal():
                raise ValueError("has a port that is no number; percent-encode special characters in the password")
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        modes = get_args(get_args(TlsSettings.model_fields["sslmode"].annotation)[0])
        if query.get("sslmode", "prefer") not in modes:
            raise ValueError(f"has an unknown sslmode; valid: {', '.join(modes)}")
        if "," in query.get("host", ""):
            raise ValueError("names several hosts in its query; name them before the path, as in postgresql://a,b/db")
        if query.get("target_session_attrs", WRITABLE[0]) not in WRITABLE:
            raise ValueError(f"has a target_session_attrs other than {' or '.join(WRITABLE)}: the processor writes")
        for name, value in query.items():
            if reason := _unsafe_server_setting(name, value):
                raise ValueError(f"{name} in its query {reason}")
        return url

    @field_validator("schema")
    @classmethod
    def _is_a_plain_name(cls, schema: str | None) -> str | None:
        if schema is not None and (not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", schema) or schema.startswith("pg_")):
            raise ValueError("must be a name of small letters, digits and _, which does not begin with pg_")
        return schema

    @field_validator("settings", mode="before")
    @classmethod
    def _server_settings(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError("must be a table of Postgres settings")  # noqa: TRY004 - pydantic's protocol
        settings = {name: librdkafka.as_text(item) for name, item in sources.flatten(value)}
        refused = [
            (name, reason)
            for name, item in settings.items()
            if (reason := _unsafe_server_setting(name, item)) is not None
        ]
        if refused:
            summary = "; ".join(f"{name} {reason}" for name, reason in refused)
            raise PydanticCustomError("properties", "{summary}", {"summary": summary, "refused": refused})
        return settings

    def connect_kwargs(self, consumer: str) -> dict[str, Any]:
        """Everything asyncpg.connect is given."""
        dsn = self.url.get_secret_value()
        tls = {name: _revealed(value) for name, value in self.tls if value is not None}
        if tls:
            dsn += ("&" if urlsplit(dsn).query else "?") + urlencode(tls, quote_via=quote)
        in_url = parse_qs(urlsplit(dsn).query)
        defaults = {
            "application_name": f"processor:{consumer}",
            "idle_in_transaction_session_timeout": str(self.idle_in_transaction_timeout_ms),
            # For single statements; batches say it themselves.
            "default_transaction_isolation": "read committed",
        }
        server_settings = {name: value for name, value in defaults.items() if name not in in_url}
        kwargs: dict[str, Any] = {
            "dsn": dsn,
            # Also of a single host, whose name may lead to another server after a failover: a lock that is taken on a
            # reader keeps nobody from taking it on the writer.
            "target_session_attrs": in_url.get("target_session_attrs", WRITABLE)[0],
            "timeout": self.connect_timeout_ms / 1000,
            "command_timeout": self.command_timeout_ms / 1000,
            "server_settings": server_settings | self.settings,
        }
        if self.password is not None:
            kwargs["password"] = self.password.get_secret_value()
        return kwargs


# What a profile stands for; each value can still be set by itself.
PROFILES: Mapping[str, Mapping[str, int]] = {
    "latency": {"max_messages": 200, "linger_ms": 0},
    "balanced": {"max_messages": 1000, "linger_ms": 20},
    "throughput": {"max_messages": 4000, "linger_ms": 200},
}


class BatchSettings(_Table):
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


class FailureSettings(_Table):
    """What becomes of a message that cannot be processed."""

    policy: Literal["dead-letter", "park-key", "halt"] = "dead-letter"
    dead_letter_topic: str = "{topic}.{consumer}.dlq"
    timeout_ms: Milliseconds = 60_000
    quarantine_after: int = Field(default=3, ge=2, le=100)
    budget_consecutive: int = Field(default=100, ge=1)
    budget_percent: int = Field(default=50, ge=1, le=100)
    budget_window: int = Field(default=1000, ge=10)
    classes: dict[str, Class] = {}

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


class EffectSettings(_Table):
    """For handlers that act on the world outside: how long one of them may be silent before it is taken for dead."""

    lease_ms: Milliseconds = 30_000
    reap_ms: Milliseconds = 5_000


class RunSettings(_Table):
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
                raise PydanticCustomError(
                    "properties",
                    "dead letters",
                    {"refused": [("failure.dead_letter_topic", f"{name} is read by this consumer: an endless loop")]},
                )
            if name is not None and len(name) > 249:
                reason = f"{name[:40]}… has {len(name)} characters, 249 at most"
                raise PydanticCustomError(
                    "properties", "dead letters", {"refused": [("failure.dead_letter_topic", reason)]}
                )
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
            described["kafka"][name] = {
                key: HIDDEN if isinstance(value, SecretStr) else value for key, value in table.items()
            }
        described["database"]["url"] = hide_password(self.database.url.get_secret_value())
        if self.database.password is not None:
            described["database"]["password"] = HIDDEN
        if self.database.tls.sslpassword is not None:
            described["database"]["tls"]["sslpassword"] = HIDDEN
        return described

    def redact(self, text: str) -> str:
        """The text of a foreign error, with every secret we know of taken out."""
        url = self.database.url.get_secret_value()
        text = text.replace(url, hide_password(url))
        for secret in sorted(self._secrets(), key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return text

    def _secrets(self) -> set[str]:
        tables = (self.kafka.client, self.kafka.consumer, self.kafka.producer)
        secrets: list[Any] = [value for table in tables for value in table.values()]
        secrets += [self.database.password, self.database.tls.sslpassword]
        found = {value.get_secret_value() for value in secrets if isinstance(value, SecretStr)}
        parts = urlsplit(self.database.url.get_secret_value())
        password = parts.netloc.rpartition("@")[0].partition(":")[2]
        found |= {password, unquote(password), *parse_qs(parts.query).get("password", [])}
        # Shorter ones are no secret worth the name, and would take ordinary words apart.
        return {secret for secret in found if len(secret) > 3}


def load(path: str | Path, environ: Mapping[str, str] | None = None) -> Settings:
    """Read, merge and check one deployment's settings; ConfigError has one line for each problem."""
    source, base = str(path), Path(path).parent
    environ = os.environ if environ is None else environ
    file = sources.from_file(Path(path), Settings)
    variables = sources.from_environment(environ, frozenset(KEYS) | {"topic"}, base)
    problems = file.problems + variables.problems + _stray_variables(environ)

    if {"topic", "topics"} & variables.tables.keys():
        file.tables = {key: value for key, value in file.tables.items() if key not in ("topic", "topics")}
    values = sources.merge(file.tables, variables.tables)
    single = "topic" in values
    if single and "topics" in values:
        problems.append(Problem(("topics",), "give either topic or topics, not both"))
    elif single:
        values["topics"] = values["topic"]
    values.pop("topic", None)
    for key in [key for key in values if key not in KEYS]:
        problems.append(_unknown((key,)))
        del values[key]
    problems += _locate_migrations(values, base)
    if isinstance(batch := values.setdefault("batch", {}), dict):
        values["batch"] = {**PROFILES.get(str(values.get("profile")), {}), **batch}

    try:
        settings = Settings(**values, source=source)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        problems += [problem for detail in details for problem in _problems(detail, values)]
    else:
        if not problems:
            return settings
    raise ConfigError("\n".join(_lines(source, problems, variables.variables, single)))


def one_by_one(url: str) -> dict[str, str]:
    """For each host that a Postgres URL names, by name, the URL that names no other."""
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    if "," not in hosts:
        return {hosts: url}
    return {host: urlunsplit(parts._replace(netloc=f"{login}{at}{host}")) for host in hosts.split(",")}


def hide_password(url: str) -> str:
    """The URL with `***` for its password; when in doubt, more is hidden rather than less."""
    hidden = re.sub(r"(://[^:@/?]*):.*@", rf"\1:{HIDDEN}@", url, flags=re.DOTALL)
    return re.sub(r"((?:ssl)?password=)[^&]*", rf"\1{HIDDEN}", hidden)


KEYS = tuple(name for name in Settings.model_fields if name != "source")
TABLES = ("message", "kafka", "database", "batch", "retry", "failure", "effects", "run")


def _checked_chain(chain: tuple[str, ...], valid: tuple[str, ...], always: str) -> tuple[str, ...]:
    if not chain:
        raise ValueError("names no strategy")
    for strategy in chain:
        _check_strategy(strategy, valid)
    for strategy in chain[:-1]:
        if strategy.startswith(always):
            raise ValueError(f"{strategy} always yields, so what comes after it is never used")
    return chain


def _check_strategy(strategy: str, valid: tuple[str, ...]) -> None:
    kind, colon, rest = strategy.partition(":")
    kinds = {name.partition(":")[0]: name for name in valid}
    if kind not in kinds or bool(colon) != (":" in kinds[kind]):
        near = difflib.get_close_matches(kind, kinds, n=1, cutoff=0.5)
        hint = f"did you mean {kinds[near[0]]}" if near else f"valid: {', '.join(valid)}"
        raise ValueError(f"unknown strategy {strategy!r}; {hint}{'?' if near else ''}")
    if kind in ("header", "constant") and not rest:
        raise ValueError(f"{strategy!r} lacks a name, as in {kind}:NAME")
    if kind == "payload" and (not rest.startswith("/") or re.search(r"~(?![01])", rest)):
        raise ValueError(f"{strategy!r} is no JSON pointer, as in payload:/order/id (~ is written ~0, / is ~1)")
    if kind == "business":
        _check_template(strategy, rest)


def _check_template(strategy: str, template: str) -> None:
    fields = re.findall(r"\{([^{}]*)\}", template)
    if re.search(r"[{}]", re.sub(r"\{[^{}]*\}", "", template)):
        raise ValueError(f"{strategy!r} has unbalanced braces")
    if not fields:
        raise ValueError(f"{strategy!r} names no field, as in business:order:{{order_id}}")
    for name in fields:
        if not re.fullmatch(r"[^\W\d][\w.-]*", name):
            raise ValueError(f"{strategy!r} has a field that is no plain name, as in {{order_id}}")


def _unsafe_server_setting(name: str, value: str) -> str | None:
    if name == "synchronous_commit" and value.lower() in ("off", "false", "no", "0"):
        return "must not be off: Postgres could forget a commit whose outputs are published"
    if name == "default_transaction_isolation" and value.lower() != "read committed":
        return "must stay read committed: a claim that waited must see the row it lost to"
    return None


def _hides(name: str, value: Any) -> bool:
    return name in librdkafka.SECRETS and not isinstance(value, SecretStr)


def _revealed(value: Any) -> Any:
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def _locate_migrations(values: dict[str, Any], base: Path) -> list[Problem]:
    database = values.get("database")
    folders = database.get("migrations") if isinstance(database, dict) else None
    if not isinstance(database, dict) or not isinstance(folders, list):
        return []
    problems = []
    located: list[Any] = []
    for folder in folders:
        located.append(sources.locate(folder, base) if isinstance(folder, str) else folder)
        if isinstance(folder, str) and not located[-1].is_dir():
            problems.append(Problem(("database", "migrations"), f"{folder}: no such folder"))
    database["migrations"] = located
    return problems


def _names_at(path: tuple[str, ...]) -> list[str]:
    """The valid keys of the table at this path."""
    if not path:
        return ["topic", *KEYS]
    if path[0] == "handlers":
        return list(HandlerSettings.model_fields)
    model: Any = Settings
    for key in path:
        model = model.model_fields[key].annotation
    names = list(model.model_fields)
    return names + [f"{key[-1]}_file" for key in sources.SECRET_KEYS if key[:-1] == path]


def _unknown(path: tuple[str, ...]) -> Problem:
    """Name the nearest key: first a neighbour, then one of that name in another table."""
    *parents, key = path
    names = _names_at(tuple(parents))
    near = difflib.get_close_matches(key.replace("-", "_").lower(), names, n=1, cutoff=0.6)
    if near:
        hint = f"did you mean {'.'.join((*parents, near[0]))}?"
    else:
        elsewhere = [(table, key) for table in TABLES if key in _names_at((table,))]
        hint = f"did you mean {'.'.join(elsewhere[0])}?" if elsewhere else f"valid here: {', '.join(names)}"
    return Problem(path, f"unknown key; {hint}")


def _problems(detail: ErrorDetails, values: Mapping[str, Any]) -> list[Problem]:
    path = tuple(str(part) for part in detail["loc"] if isinstance(part, str) and part != "[key]")
    context = detail.get("ctx", {})
    if detail["type"] == "extra_forbidden":
        return [_unknown(path)]
    if detail["type"] == "properties":
        return [Problem((*path, name), reason) for name, reason in context["refused"]]
    if detail["type"] == "missing":
        if path in (("kafka",), ("database",)):  # the table is there for its one required key
            path = (*path, "bootstrap_servers" if path == ("kafka",) else "url")
        if path == ("topics",):
            path = ("topic",)
        return [Problem(path, f"is required; set it here or as {_variable(path)}")]
    if detail["type"] == "literal_error":
        return [Problem(path, _not_one_of(str(context["expected"]), _given(values, path)))]
    if detail["type"] == "tuple_type":
        return [Problem(path, "must be a list of strings")]
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type", "mapping_type"):
        return [Problem(path, f"must be a table; from the environment, set its keys: {_variable(path)}__…")]
    if _given(values, path) is None and detail["type"] in ("string_type", "none_required"):
        return []  # a secret file that could not be read, reported already
    text = str(context["error"]) if "error" in context else detail["msg"].replace("Input should be", "must be")
    return [Problem(path, text.removeprefix("Value error, "))]


def _not_one_of(expected: str, given: Any) -> str:
    names = re.findall(r"'([^']*)'", expected)
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.6)
    return f"must be one of {', '.join(names)}" + (f"; did you mean {near[0]}?" if near else "")


def _given(values: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _variable(path: tuple[str, ...]) -> str:
    section, *keys = path
    return PREFIX + "__".join((section.upper(), *(key if section == "handlers" else key.upper() for key in keys)))


def _stray_variables(environ: Mapping[str, str]) -> list[Problem]:
    """Variables that look like settings and are none: `PROCESSOR_DATABASE_URL`, `PROCESSOR_KAFAK__START`."""
    settings = {_variable((key,)) for key in ("topic", *KEYS)}
    for table in TABLES:
        settings |= {_variable((table, key)) for key in _names_at((table,))}
    squeezed = {name.replace("_", ""): name for name in settings}
    firsts = {key.upper(): key for key in ("topic", *KEYS)}
    problems = []
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX)
        first, *rest = name.split("__")
        if name == variable or name in sources.RESERVED or first.upper() in firsts:
            continue
        if meant := squeezed.get(variable.replace("_", "")):
            problems.append(Problem((variable,), f"unknown variable; did you mean {meant}?"))
        elif near := difflib.get_close_matches(first, firsts, n=1, cutoff=0.75 if rest else 0.85):
            meant = PREFIX + "__".join((near[0], *rest))
            problems.append(Problem((variable,), f"unknown variable; did you mean {meant}?"))
    return problems


def _lines(source: str, problems: list[Problem], variables: Mapping[tuple[str, ...], str], single: bool) -> list[str]:
    """One line for each problem, unknown keys first: a missing key is often just a misspelt one."""
    unknown = [problem for problem in problems if problem.text.startswith("unknown")]
    others = [problem for problem in problems if problem not in unknown]
    suggested = " ".join(problem.text for problem in unknown)
    lines = []
    for problem in unknown + others:
        key = ".".join(problem.path)
        if problem.text.startswith("is required") and f"did you mean {key}?" in suggested:
            continue
        if single and key == "topics":
            key = "topic"
        variable = variables.get(problem.path)
        origin = f" (from {variable})" if variable else ""
        lines.append(f"{source}: {key}{origin}: {' '.join(problem.text.split())}")
    return list(dict.fromkeys(lines))
