"""Ends handlers that take too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from processor.errors import text_of

if TYPE_CHECKING:
    from processor.handling.registry import Route
    from processor.messages.message import Message
    from processor.observe.stalls import Stalls


def described(message: Message[Any]) -> str:
    """For people."""
    return f"{message.topic}:{message.partition}:{message.offset} ({message.id})"


class HandlerTimeout:
    """Ends handlers that take too long, with one timer for all calls of a task: one for each would be dear.

    `stalls` sees from outside what is at work here. `what` says, for people, what that is for.
    """

    def __init__(self, stalls: Stalls, what: Callable[[], str]) -> None:
        self._stalls = stalls
        self.what = what
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self.task: asyncio.Task[object] = task
        self.route: Route
        self.began: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.expired = False

    @property
    def handler(self) -> str:
        return self.route.name

    @property
    def timeout_seconds(self) -> float:
        return self.route.timeout_seconds

    def __enter__(self) -> Self:
        self._stalls.calls.add(self)
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stalls.calls.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    async def call(self, route: Route, argument: Any, database: Any) -> Any:
        """A handler's answer."""
        self.begin(route)
        try:
            return await route.handler(argument, database)
        except Exception:
            raise
        except BaseException as error:
            self.explain(route, error)
            raise
        finally:
            self.end()

    def begin(self, route: Route) -> float:
        """A handler is about to be called; gives the time."""
        self.route = route
        # Not the loop's time, which stands still for as long as nobody lets it go on.
        self.began = now = monotonic()
        if self._timer is None:
            self._timer = self._loop.call_later(route.timeout_seconds, self._look)
        return now

    def explain(self, route: Route, error: BaseException) -> None:
        """What is no Exception is the handler's failure too, unless it was us who cancelled it.

        SystemExit in a task of ours would end the event loop, and the process with the handler's own exit code.
        """
        if isinstance(error, GeneratorExit):  # Python's, for a coroutine that is thrown away
            return
        if not isinstance(error, asyncio.CancelledError):
            raise HandlerExit(f"{route.name} raised {type(error).__name__}: {text_of(error)}") from error
        if self.expired:
            self.expired = False
            if self.task.uncancel() == 0:
                raise HandlerTimedOut(f"{route.name} took longer than {route.timeout_seconds:g} s") from None
        if not self.task.cancelling():
            raise RuntimeError("the handler let a cancellation through") from error

    def end(self) -> None:
        """It has come to its end, whichever. Need not be said if the next one begins before anybody waits."""
        self.began = None
        if self.expired:  # it went on regardless
            self.expired = False
            self.task.uncancel()

    def _look(self) -> None:
        self._timer = None
        if self.began is None:
            return
        left = self.began + self.route.timeout_seconds - monotonic()
        if left <= 0:
            self.expired = True
            self.task.cancel()
        else:
            self._timer = self._loop.call_later(left, self._look)


class HandlerTimedOut(Exception):
    """A handler took longer than it may."""


class HandlerExit(Exception):
    """A handler raised what would end the process, such as SystemExit."""
