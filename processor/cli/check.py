"""`processor check`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from processor.cli.arguments import ConfigFile, grouped
from processor.cli.deployment import load
from processor.cli.output import Format, Output, print_json, print_line
from processor.errors import ConfigError
from processor.operations import check as checks

MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("–", "dim")}


@grouped
def check(
    config_file: ConfigFile,
    *,
    connect: Annotated[
        bool,
        typer.Option("--connect", help="Also ask brokers and database: topics, permissions, schema. Changes nothing."),
    ] = False,
    output: Output,
) -> None:
    """Validate a configuration, its handlers' imports included, without side effects.

    Secrets are never shown. Exit status 2 if the configuration is wrong, 1 if
    a server is not as needed.
    """
    described: dict[str, Any] | None = None
    try:
        settings = load(config_file)
    except ConfigError as error:
        if output.format is Format.TABLE:
            raise
        findings = [checks.Finding("configuration", str(config_file), False, line) for line in str(error).splitlines()]
    else:
        described = settings.describe()
        findings = checks.offline(settings)
        if connect and checks.exit_code(findings) == 0:
            findings += checks.connected(settings)
    code = checks.exit_code(findings)
    match output.format:
        case Format.JSON:
            print_json({"ok": code == 0, "checks": findings, "settings": described})
        case Format.JSONL:
            for finding in findings:
                print_line(finding)
        case Format.TABLE:
            _print(findings)
    raise typer.Exit(code)


def _print(findings: list[checks.Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        name = "" if finding.ok is False else f"{finding.name}: "  # what is wrong begins with its place
        console.print(Text.assemble(MARKS[finding.ok], f" {name}{finding.text}"))
