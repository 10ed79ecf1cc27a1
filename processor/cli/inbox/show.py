"""`processor inbox show`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from processor.cli.arguments import grouped
from processor.cli.deployment import load
from processor.cli.dlq.show import TYPE, config_and_id, print_message
from processor.cli.output import Output
from processor.operations import inbox, names
from processor.postgres import connections
from processor.settings.schema import Settings


@grouped
def show(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[CONFIG] ID", help="CONFIG can be left out if PROCESSOR_CONFIG is set."),
    ],
    *,
    type_: Annotated[str | None, typer.Option("--type", help=TYPE)] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Give up a search after this many seconds.")] = 10.0,
    output: Output,
) -> None:
    """Show what the inbox has of one message, whatever its status: where it came from, its result, its history.

    It only reads. What became of the message in Kafka, `processor trace` says.

    \b
    processor inbox show shop.toml order-4711
    processor inbox show shop.toml order-4711 --json | jq .result
    """
    config_file, message_id = config_and_id(words, "inbox show")

    async def act(settings: Settings) -> dict[str, Any]:
        async with connections.read_only(settings, timeout, inbox.SLOW) as db:
            return await names.shown(db, settings, message_id, type_)

    print_message(asyncio.run(act(load(config_file))), output.format)
