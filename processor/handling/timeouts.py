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
    """Return the place and id of a message, for people."""
    return f"{message.topic}:{message.partition}:{message.offset} ({message.id})"


class HandlerTimeout:
    """Ends handlers that take too long, with one timer for all calls of a task: one timer per call would be slow.

    `stalls` watches the calls from another thread. `what` describes, for people, the messages of the current call.
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
        """Call a handler and return its answer."""
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
        """Start the clock for a handler that is about to be called; return the time."""
        self.route = route
        # Not the loop's time: the loop does not update it while a callback runs.
        self.began = now = monotonic()
        if self._timer is None:
            self._timer = self._loop.call_later(route.timeout_seconds, self._look)
        return now

    def explain(self, route: Route, error: BaseException) -> None:
        """Turn a BaseException into a failure of the handler, unless we were cancelled.

        SystemExit in a task of ours would end the event loop, and the process with the handler's own exit code.
        """
        if isinstance(error, GeneratorExit):  # Python closes a coroutine that is never finished
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
        """Stop the clock. Not needed if the next handler begins without an await in between."""
        self.began = None
        if self.expired:  # the handler swallowed the cancellation and went on
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
    """A handler took longer than its time-out."""


class HandlerExit(Exception):
    """A handler raised an exception that would end the process, such as SystemExit."""
