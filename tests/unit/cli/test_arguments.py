"""Options that commands share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from processor.cli.arguments import grouped


@dataclass(frozen=True)
class Place:
    topic: Annotated[str, typer.Option("--topic", help="Input topic.")] = "orders"
    partition: Annotated[int | None, typer.Option("--partition")] = None


def made() -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @grouped
    def look(name: Annotated[str, typer.Argument()], place: Place, *, loud: bool = False) -> None:
        """Look at a place."""
        typer.echo(json.dumps([name, place.topic, place.partition, loud]))

    return app


def test_a_group_is_made_of_the_options_of_its_fields() -> None:
    done = CliRunner().invoke(made(), ["a", "--partition", "3", "--loud"])
    assert json.loads(done.output) == ["a", "orders", 3, True]
    assert json.loads(CliRunner().invoke(made(), ["a"]).output) == ["a", "orders", None, False]


def test_help_shows_the_options_of_a_group() -> None:
    shown = CliRunner().invoke(made(), ["--help"]).output
    assert "Look at a place." in shown
    assert "Input topic." in shown
