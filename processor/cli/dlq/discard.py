"""`processor dlq discard`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from processor.cli.arguments import ConfigFile, WrongUse, Yes, grouped, require_terminal, storable, user
from processor.cli.deployment import load
from processor.cli.dlq.filters import All, FiltersBesideReason, require_choice
from processor.cli.output import Format, Output, counted, print_json, print_line
from processor.operations import dead_letters
from processor.operations import discard as operation
from processor.postgres import connections


@grouped
def discard(
    config_file: ConfigFile,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept with the message.")],
    filters: FiltersBesideReason,
    *,
    all_: All = False,
    by: Annotated[
        str | None, typer.Option(help="Who; kept with the message. Default: user@host.", show_default=False)
    ] = None,
    yes: Yes = False,
    output: Output,
) -> None:
    """Give messages up for good; their rows stay, with who, when and why. The service skips them from then on."""
    wanted = filters.wanted()
    require_choice(wanted, all_)
    if not reason.strip():
        raise WrongUse("--reason is empty: say why, it is kept with the message")
    if not yes:
        require_terminal("discard")
    settings = load(config_file)

    async def count() -> int:
        async with connections.with_tables(settings) as db:
            return await dead_letters.count(db, settings, wanted)

    async def act() -> tuple[int, int]:
        async with connections.with_tables(settings) as db:
            return await operation.discard(db, settings, wanted, storable(by or user()), storable(reason))

    number = None if yes else asyncio.run(count())
    if number:
        typer.confirm(f"give up {counted(number, 'message')} for good?", abort=True, err=True)
    done, parked = (0, 0) if number == 0 else asyncio.run(act())
    if output.format is not Format.TABLE:
        print_ = print_json if output.format is Format.JSON else print_line
        print_({"discarded": done, "keys_still_parked": parked})
        return
    typer.echo(f"discarded {done}" if done else "nothing to discard: no failed or parked message matches")
    if parked:
        typer.echo(f"{parked} of their keys still have parked messages: send those with `processor dlq redrive`")
