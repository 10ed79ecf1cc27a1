"""`[database]`: where Postgres is, and everything that asyncpg.connect is given."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import parse_qs, quote, urlencode, urlsplit, urlunsplit

from pydantic import Field, SecretStr, field_validator

from processor.settings import librdkafka, sources
from processor.settings.secrets import revealed
from processor.settings.table import Milliseconds, Table, refused

# Any other value of target_session_attrs could lead to a server that accepts no writes.
WRITABLE = ["read-write", "primary"]


class TlsSettings(Table):
    """TLS to Postgres. The names are those of libpq, and the same ones work in the URL's query."""

    sslmode: Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"] | None = Field(
        default=None,
        description="`disable`, `allow`, `prefer` (what an absent key means), `require`, `verify-ca` or `verify-full`. "
        "Only the last two check who the server is.",
    )
    sslnegotiation: Literal["postgres", "direct"] | None = Field(
        default=None,
        description="`postgres` asks the server for TLS first; `direct` begins with it (PostgreSQL 17 on).",
    )
    sslrootcert: str | None = Field(default=None, description="File with the certificates of trusted authorities.")
    sslcert: str | None = Field(default=None, description="File with the client's certificate.")
    sslkey: str | None = Field(default=None, description="File with the client's private key.")
    sslpassword: SecretStr | None = Field(default=None, description="Password of that key; a secret.")
    sslcrl: str | None = Field(default=None, description="File with revoked certificates.")
    ssl_min_protocol_version: str | None = Field(default=None, description="Such as `TLSv1.2`.")
    ssl_max_protocol_version: str | None = Field(default=None, description="Such as `TLSv1.3`.")

    @field_validator("sslrootcert", "sslcert", "sslkey", "sslcrl")
    @classmethod
    def _is_a_file(cls, value: str | None) -> str | None:
        if value is not None and not Path(value).is_file():
            raise ValueError(f"{value}: no such file")
        return value


# pydantic warns because BaseModel has a deprecated method of that name; for a user it is the obvious key.
warnings.filterwarnings("ignore", 'Field name "schema"', UserWarning)


class DatabaseSettings(Table):
    """Where Postgres is, and how it is used."""

    url: SecretStr = Field(
        description="As in `postgresql://user@host:5432/name`; a secret. It may name [several hosts](#several-hosts)."
    )
    password: SecretStr | None = Field(default=None, description="Instead of a password in the URL; a secret.")
    schema: str | None = Field(  # type: ignore[assignment]
        default=None,
        description="A schema for the processor's own tables, instead of where `search_path` leads; see "
        "[tables](#tables-in-postgres).",
    )
    tls: TlsSettings = TlsSettings()
    settings: dict[str, str] = Field(
        default={},
        description='Any Postgres setting for the processor\'s sessions, such as `statement_timeout = "20s"`.',
    )
    idle_in_transaction_timeout_ms: Milliseconds = Field(
        default=30_000, description="Postgres ends a transaction whose process has been silent for this long."
    )
    connect_timeout_ms: Milliseconds = Field(
        default=10_000, description="How long each host of the URL has to accept a connection."
    )
    command_timeout_ms: Milliseconds = Field(
        default=60_000, description="A statement that has no answer after this is given up."
    )
    migrations: tuple[Path, ...] = Field(
        default=(),
        description="Folders with the handlers' own tables, `0001_name.sql` and on, looked for in the working "
        "directory, then beside the configuration file; see [tables](#tables-in-postgres).",
    )

    @property
    def idle_seconds(self) -> float:
        """How long we leave a transaction idle at most: well below what Postgres allows."""
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
                raise ValueError("has a port that is not a number; percent-encode special characters in the password")
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
            raise ValueError("must be a name of lower-case letters, digits and _, and must not begin with pg_")
        return schema

    @field_validator("settings", mode="before")
    @classmethod
    def _server_settings(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError("must be a table of Postgres settings")  # noqa: TRY004 - pydantic's protocol
        settings = {name: librdkafka.as_text(item) for name, item in sources.flatten(value)}
        problems = [(name, reason) for name, item in settings.items() if (reason := _unsafe_server_setting(name, item))]
        if problems:
            raise refused(problems)
        return settings

    def connect_kwargs(self, consumer: str) -> dict[str, Any]:
        """Everything that asyncpg.connect is given."""
        dsn = self.url.get_secret_value()
        tls = {name: revealed(value) for name, value in self.tls if value is not None}
        if tls:
            dsn += ("&" if urlsplit(dsn).query else "?") + urlencode(tls, quote_via=quote)
        in_url = parse_qs(urlsplit(dsn).query)
        defaults = {
            "application_name": f"processor:{consumer}",
            "idle_in_transaction_session_timeout": str(self.idle_in_transaction_timeout_ms),
            # For single statements; a batch sets its own.
            "default_transaction_isolation": "read committed",
        }
        server_settings = {name: value for name, value in defaults.items() if name not in in_url}
        kwargs: dict[str, Any] = {
            "dsn": dsn,
            # For a single host too: after a failover its name may lead to a read-only server, and a lock that one
            # process takes there does not stop another from taking it on the primary.
            "target_session_attrs": in_url.get("target_session_attrs", WRITABLE)[0],
            "timeout": self.connect_timeout_ms / 1000,
            "command_timeout": self.command_timeout_ms / 1000,
            "server_settings": server_settings | self.settings,
        }
        if self.password is not None:
            kwargs["password"] = self.password.get_secret_value()
        return kwargs


def one_by_one(url: str) -> dict[str, str]:
    """For each host in a Postgres URL, the URL with that host alone."""
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    if "," not in hosts:
        return {hosts: url}
    return {host: urlunsplit(parts._replace(netloc=f"{login}{at}{host}")) for host in hosts.split(",")}


def _unsafe_server_setting(name: str, value: str) -> str | None:
    if name == "synchronous_commit" and value.lower() in ("off", "false", "no", "0"):
        return "must not be off: Postgres could forget a commit whose outputs are published"
    if name == "default_transaction_isolation" and value.lower() != "read committed":
        return "must stay read committed: a claim that waited must see the row it lost to"
    return None
