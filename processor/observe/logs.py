"""Logs: one line per event on stderr, as JSON for machines, or as readable text on a terminal.

An event has a stable snake_case name and its data as keys. `PROCESSOR_LOG_FORMAT` (json, console or auto)
chooses the form, `PROCESSOR_LOG_LEVEL` (debug to critical) the lowest level. Logs of the standard library,
asyncio and warnings take the same form. A SecretStr never appears, however deeply it is nested. In a worker, which
has `PROCESSOR_WORKER` in its environment, each line has that number.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import orjson
import structlog
from pydantic import SecretStr

from processor.errors import ConfigError
from processor.observe.events import Event

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("auto", "console", "json")
HIDDEN = "***"
WORKER = "PROCESSOR_WORKER"


def get_logger(**context: Any) -> structlog.stdlib.BoundLogger:
    """Return a logger that adds this context to all its events."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("processor", **context)
    return logger


log = get_logger()


def write(event: Event) -> None:
    """Write an event's line; a listener of the engine."""
    getattr(log, event.severity)(event.name, **event.data())


def are_json(environ: Mapping[str, str] | None = None) -> bool:
    """Whether each line on stderr is an object for machines; else they are for people."""
    form = _choice(os.environ if environ is None else environ, "PROCESSOR_LOG_FORMAT", FORMATS, "auto")
    return form == "json" or (form == "auto" and not sys.stderr.isatty())


def configure(environ: Mapping[str, str] | None = None) -> None:
    """Send every log of this process to stderr. Another call replaces the configuration."""
    environ = os.environ if environ is None else environ
    level = _choice(environ, "PROCESSOR_LOG_LEVEL", LEVELS, "info")
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        *([_of_worker(int(environ[WORKER]))] if WORKER in environ else []),
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _without_secrets,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *(_json() if are_json(environ) else _console()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # asyncio logs its selector at debug level, which does not help to debug a deployment.
    logging.getLogger("asyncio").setLevel(max(root.level, logging.INFO))
    logging.captureWarnings(True)


def _of_worker(number: int) -> structlog.typing.Processor:
    """To every line: threads, asyncio and librdkafka have no context of ours that could carry it."""

    def add(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["worker"] = number
        return event

    return add


def _console() -> list[structlog.typing.Processor]:
    colors = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    return [structlog.dev.ConsoleRenderer(colors=colors)]


def _json() -> list[structlog.typing.Processor]:
    return [structlog.processors.format_exc_info, _render_json]


def _render_json(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
    ordered = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_UTC_Z
    try:
        line = orjson.dumps(ordered | dict(event), default=_plain, option=options)
    except TypeError:  # such as an integer beyond 64 bits or a lone surrogate: text is better than no line
        line = orjson.dumps({str(key): _printable(value) for key, value in (ordered | dict(event)).items()})
    return line.decode()


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "backslashreplace")
    return str(value)


def _printable(value: Any) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()


def _without_secrets(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {key: _hidden(value) for key, value in event.items()}


def _hidden(value: Any) -> Any:
    match value:
        case SecretStr():
            return HIDDEN
        case dict():
            return {key: _hidden(item) for key, item in value.items()}
        case list() | tuple():
            return [_hidden(item) for item in value]
        case _:
            return value


def _choice(environ: Mapping[str, str], variable: str, valid: tuple[str, ...], default: str) -> str:
    chosen = environ.get(variable, "").strip().lower() or default
    if chosen not in valid:
        raise ConfigError(f"{variable}: must be one of {', '.join(valid)}")
    return chosen
