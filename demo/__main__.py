"""`python -m demo`: options, signals, exit codes. It exits with 0 only if nothing was lost and nothing doubled."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import asyncpg
import typer
from confluent_kafka import KafkaException

from demo import show as shows
from demo import story
from demo.errors import DemoError
from demo.show import Show
from demo.summary import Summary
from demo.verify import UnreadableError
from processor.errors import ProcessorError
from processor.stack import Stack
from processor.stack.display import display

MOST_ORDERS = 1_000_000


class Interrupted(BaseException):
    """A signal asked us to stop. Raised once; later signals are ignored until everything is cleaned up."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number


def main(
    orders: Annotated[int, typer.Option(min=1, max=MOST_ORDERS, help="Distinct orders to feed.")] = 30_000,
    kills: Annotated[
        int, typer.Option(min=0, max=20, help="SIGKILLs: the first between the two commits, the others at random.")
    ] = 2,
    directory: Annotated[
        Path, typer.Option("--directory", "-d", envvar="PROCESSOR_STACK_DIR", help="Folder of the local stack.")
    ] = Path(".stack"),
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the stack running, with the database and topics of this run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the summary, as JSON.")] = False,
) -> None:
    """Feed orders to the processor, kill it in the middle, and show that nothing is lost or doubled.

    Exit status: 0 nothing lost, nothing doubled; 1 something was, or the demo could not finish.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        summary = _play(shows.suited(silent=as_json), directory, orders, kills, keep=keep, silent=as_json)
    except Interrupted as interrupted:
        print("interrupted: everything is cleaned up", file=sys.stderr)  # noqa: T201
        raise typer.Exit(interrupted.exit_code) from None
    except (DemoError, UnreadableError, ProcessorError) as error:
        _fail(str(error))
    except KafkaException as error:
        _fail(f"Kafka: {error.args[0].str()}")
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        _fail(f"{type(error).__name__}: {error}")
    if as_json:
        typer.echo(json.dumps(summary.as_json(), indent=2))
    raise typer.Exit(0 if summary.ok else 1)


def _play(show: Show, directory: Path, orders: int, kills: int, *, keep: bool, silent: bool) -> Summary:
    stack = Stack(directory)
    running = bool(stack.status()) and all(server.state == "running" for server in stack.status())
    fresh = not stack.status()
    try:
        with display(quiet=silent) as progress:
            # A fresh folder holds no data to keep, so a guard stops the servers even if this process gets SIGKILL.
            stack.up(guarded=fresh and not keep, display=progress)
        show.say(f"Kafka {stack.bootstrap_servers} and PostgreSQL are {'up already' if running else 'up'}")
        with show:
            summary = asyncio.run(_until_interrupted(story.play(stack, show, orders, kills, keep=keep)))
            show.end()
            show.summary(summary)
        if not summary.ok:
            show.say(f"the processor's log: {stack.directory / 'logs' / 'demo-processor.log'}")
        if keep:
            show.say(f"left running: Kafka {stack.bootstrap_servers}, PostgreSQL {stack.postgres_url}")
            show.say("the run's database and topics are named demo-…; stop it all with `processor stack down`")
        return summary
    finally:
        if not running and not keep:
            _undisturbed()
            stack.down()


async def _until_interrupted(scenes: Coroutine[Any, Any, Summary]) -> Summary:
    """Turn the first signal into a cancellation, so that every scene cleans up."""
    task = asyncio.ensure_future(scenes)
    asked: list[int] = []

    def ask(number: int) -> None:
        if not asked:
            asked.append(number)
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, ask, number)
    try:
        return await task
    except asyncio.CancelledError:
        raise Interrupted(asked[0] if asked else signal.SIGINT) from None


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _undisturbed()
    raise Interrupted(number)


def _undisturbed() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _fail(text: str) -> None:
    typer.echo(f"error: {' '.join(text.split())}", err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
