"""Configuration files for tests of the settings."""

from __future__ import annotations

from pathlib import Path

from processor.kafka import properties
from processor.settings.load import load
from processor.settings.schema import Settings

PASSWORD = "correct-horse-battery"
KAFKA = 'bootstrap_servers = "localhost:9092"'
URL = f'url = "postgresql://inventory:{PASSWORD}@localhost:5432/stock"'


def toml(
    *,
    top: str = 'consumer = "inventory"\ntopic = "orders"',
    handlers: str = 'OrderPlaced = "handlers.inventory:reserve"',
    message: str = "",
    kafka: str = KAFKA,
    tables: str = "",
    database: str = URL,
    batch: str = "",
) -> str:
    return "\n".join(
        [
            top,
            f"[handlers]\n{handlers}",
            f"[message]\n{message}",
            f"[kafka]\n{kafka}\n{tables}",
            f"[database]\n{database}",
            f"[batch]\n{batch}",
        ]
    )


def settings(tmp_path: Path, text: str = "", environ: dict[str, str] | None = None) -> Settings:
    file = tmp_path / "orders.toml"
    file.write_text(text or toml())
    return load(file, environ or {}, properties.refusal)


def kafka(line: str, table: str = "client") -> str:
    return toml(tables=f"[kafka.{table}]\nsasl.password = '{PASSWORD}'\n{line}")


def failing(tables: str) -> str:
    return toml() + "\n" + tables
