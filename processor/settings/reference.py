"""The tables of docs/configuration.md, made from the settings' schema: `make docs` writes them into the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from processor.settings.schema import HandlerSettings, Settings

PAGE = Path("docs/configuration.md")
BEGIN = "<!-- Made by `make docs` from processor/settings: edit the descriptions there. -->\n"
END = "<!-- End of what `make docs` makes. -->\n"
# `source` is where the settings come from, and no key of the file.
NO_KEYS = frozenset({"source"})


def page(text: str) -> str:
    """The page with its generated part made anew; everything outside the two markers stays."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def tables() -> str:
    """A section for each table of the TOML file, the keys outside any table first."""
    return "\n".join(_sections(Settings, ""))


def _sections(model: type[BaseModel], path: str) -> Iterator[str]:
    rows: list[str] = []
    below: list[str] = []
    for name, field in model.model_fields.items():
        key = f"{path}.{name}" if path else name
        table = HandlerSettings if key == "handlers" else field.annotation
        if isinstance(table, type) and issubclass(table, BaseModel):
            below += _sections(table, key)
        elif key not in NO_KEYS:
            shown = key.replace("handlers.", "handlers.TYPE.")
            rows.append(f"| `{shown}` | {_default(name, field)} | {field.description} |\n")
    about = f"{_paragraphs(model.__doc__)}\n\n" if path and model.__doc__ else ""
    title = path or "Outside any table"
    yield f"### {title}\n\n{about}| key | default | meaning |\n|---|---|---|\n{''.join(rows)}"
    yield from below


def _default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None or value in ((), {}):
        return "none"
    size = f" ({value >> 20} MiB)" if name.endswith("_bytes") else ""
    return f"`{_toml(value)}`{size}"


def _toml(value: Any) -> str:
    number = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:_}" if number else json.dumps(value)


def _paragraphs(docstring: str) -> str:
    return "\n".join(line.strip() for line in docstring.strip().splitlines())


def main() -> None:
    if not PAGE.exists():
        sys.exit(f"{PAGE}: no such file; run this in the project's own folder, as `make docs` does")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
