"""What commands print: tables for people, JSON for programs; nothing that could steer a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from processor.cli.arguments import WrongUse


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


@dataclass(frozen=True, slots=True)
class Output:
    """The options that choose a format."""

    chosen: Annotated[
        Format,
        typer.Option(
            "--output",
            "-o",
            help="table: text for people. json: one JSON document and nothing else. jsonl: one JSON object per line.",
        ),
    ] = Format.TABLE
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False

    def __post_init__(self) -> None:
        if self.as_json and self.chosen is Format.JSONL:
            raise WrongUse("--json and -o jsonl exclude each other: give one of them")

    @property
    def format(self) -> Format:
        return Format.JSON if self.as_json else self.chosen


def print_json(value: Any) -> None:
    """One document, for people to read too."""
    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode())


def print_line(value: Any) -> None:
    """One line of JSON."""
    typer.echo(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode())


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]], colours: Mapping[str, str]) -> None:
    """Boxes on a terminal, where cells with certain texts have colours; elsewhere lines with tabs between cells."""
    console = Console()
    if not console.is_terminal:
        for row in (titles, *rows):
            typer.echo("\t".join(row))
        return
    console.print(as_table(titles, rows, colours))


def as_table(titles: Sequence[str], rows: Iterable[Sequence[str]], colours: Mapping[str, str]) -> Table:
    """Boxes, for a terminal."""
    table = Table(*titles)
    for row in rows:
        table.add_row(*(Text(cell, colours.get(cell, "")) for cell in row))
    return table


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def safe(text: str) -> str:
    """The text with everything that could steer a terminal made visible."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def time(at: datetime | None) -> str:
    return at.astimezone(UTC).isoformat(sep=" ", timespec="seconds").replace("+00:00", "Z") if at else "-"


def age(seconds: float | None) -> str:
    """How long ago, or for how long, in the largest unit that it has at least two of."""
    if seconds is None:
        return "-"
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def bytes_as_text(value: bytes | None) -> tuple[str | None, str | None]:
    """The value and its encoding: text if it is UTF-8 that cannot steer a terminal, else hex."""
    if value is None:
        return None, None
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value.hex(), "hex"
    return (text, "text") if safe(text) == text else (value.hex(), "hex")


def key_as_json(key: bytes | None) -> dict[str, str | None]:
    text, encoding = bytes_as_text(key)
    return {"key": text if encoding == "text" else None, "key_hex": None if key is None else key.hex()}


def key_as_cell(key: bytes | None) -> str:
    text, encoding = bytes_as_text(key)
    return "-" if text is None else f"0x{text}" if encoding == "hex" else " ".join(text.split("\n"))
