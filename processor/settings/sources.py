"""Where configuration comes from: one TOML file, environment variables above it, secrets also from files.

Each reader returns plain nested tables and collects problems instead of raising, so that one error shows everything
that must be corrected. A problem never repeats a value: it could be a secret.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings, TomlConfigSettingsSource

from processor.errors import ConfigError
from processor.settings import librdkafka

PREFIX = "PROCESSOR_"
RESERVED = frozenset(
    {
        *("CONFIG", "FAILPOINTS", "LOG_FORMAT", "LOG_LEVEL", "STACK_DIR"),
        *("READY_PIPE", "SUPERVISOR_PIPE", "WORKER", "WORKERS"),
    }
)
LISTS = frozenset({("topics",), ("message", "id"), ("message", "type"), ("database", "migrations")})
PROPERTY_TABLES: tuple[librdkafka.Table, ...] = ("client", "consumer", "producer")
SECRET_KEYS = (("database", "url"), ("database", "password"), ("database", "tls", "sslpassword"))

KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    path: KeyPath
    text: str


@dataclass(slots=True)
class ConfigLayer:
    """Tables from one place; `variables` names the environment variable that set a path."""

    tables: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)
    variables: dict[KeyPath, str] = field(default_factory=dict)


def from_file(path: Path, settings: type[BaseSettings]) -> ConfigLayer:
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: is a directory; name the TOML file of one deployment")
        if not path.exists():
            raise ConfigError(f"{path}: no such file{_neighbours(path)}")
        tables = TomlConfigSettingsSource(settings, path).toml_data
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: bad byte at position {error.start}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return _settled(ConfigLayer(tables), path.parent)


def from_environment(environ: Mapping[str, str], known: frozenset[str], base: Path) -> ConfigLayer:
    """Read `PROCESSOR_KAFKA__BOOTSTRAP_SERVERS` as `kafka.bootstrap_servers`.

    Variables of other programs may start with PROCESSOR_ too (Kubernetes sets some for a service of that name), so
    only names whose first part is one of `known` are ours.
    """
    layer = ConfigLayer({})
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in RESERVED:
            continue
        first, *rest = name.split("__")
        if first.lower() not in known:
            continue
        path = _path(first, rest)
        if "" in path or not _put(layer.tables, path, _value(path, environ[variable])):
            layer.problems.append(Problem((variable,), "clashes with another variable or has an empty part"))
            continue
        layer.variables[path] = variable
    return _settled(layer, base)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        merged[key] = merge(lower, value) if isinstance(lower, dict) and isinstance(value, dict) else value
    return merged


def locate(name: str, base: Path) -> Path:
    """Look for a relative path in the working directory, then beside the configuration file."""
    path = Path(name)
    return path if path.is_absolute() or path.exists() or not (base / path).exists() else base / path


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Undo the nested tables that TOML makes of an unquoted `security.protocol = …`."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _path(first: str, rest: list[str]) -> KeyPath:
    section = first.lower()
    if section == "handlers":  # message types keep their case
        return (section, *rest[:1], *(part.lower() for part in rest[1:]))
    if section == "kafka" and len(rest) > 1 and rest[0].lower() in PROPERTY_TABLES:
        return (section, rest[0].lower(), librdkafka.from_variable("_".join(rest[1:])))
    return (section, *(part.lower() for part in rest))


def _value(path: KeyPath, text: str) -> Any:
    if path not in LISTS:
        return text
    if text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return [part.strip() for part in text.split(",")]


def _put(tables: dict[str, Any], path: KeyPath, value: Any) -> bool:
    table: Any = tables
    for key in path[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            return False
    if path[-1] in table:
        return False
    table[path[-1]] = value
    return True


def _settled(layer: ConfigLayer, base: Path) -> ConfigLayer:
    """Flatten librdkafka's properties, and replace each `<secret>_file` by the secret that the file holds."""
    kafka = layer.tables.get("kafka")
    if isinstance(kafka, dict):
        for name in PROPERTY_TABLES:
            if isinstance(kafka.get(name), dict):
                kafka[name] = dict(flatten(kafka[name]))
    secrets = [("kafka", table, name) for table in PROPERTY_TABLES for name in sorted(librdkafka.SECRETS)]
    for path in (*SECRET_KEYS, *secrets):
        _read_secret(layer, path, base)
    return layer


def _read_secret(layer: ConfigLayer, path: KeyPath, base: Path) -> None:
    table: Any = layer.tables
    for key in path[:-1]:
        table = table.get(key)
        if not isinstance(table, dict):
            return
    given = (*path[:-1], f"{path[-1]}_file")
    if given[-1] not in table:
        return
    name = table.pop(given[-1])
    if given in layer.variables:
        layer.variables[path] = layer.variables[given]
    if path[-1] in table:
        layer.problems.append(Problem(given, f"give either this or {path[-1]}, not both"))
        return
    # Whatever goes wrong below, the secret counts as set: a second problem, that it is missing, would mislead.
    table[path[-1]] = None
    if not isinstance(name, str):
        layer.problems.append(Problem(given, "must be the path of a file"))
        return
    try:
        secret = locate(name, base).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        layer.problems.append(Problem(given, f"{name}: not UTF-8 text"))
    except OSError as error:
        layer.problems.append(Problem(given, f"{name}: cannot be read: {error.strerror}"))
    else:
        if not secret.strip():
            layer.problems.append(Problem(given, f"{name}: is empty"))
        table[path[-1]] = secret if path[-1].endswith(".pem") else secret.strip()


def _neighbours(path: Path) -> str:
    files = [str(file) for file in path.parent.glob("*.toml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(str(path), files, n=1)
    return f"; did you mean {near[0]}?" if near else ""
