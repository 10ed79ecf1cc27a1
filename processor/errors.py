"""Every error the processor raises, named by what happens next.

ProcessorError
├── ConfigError    the deployment is described wrongly: stop, exit 2
├── SetupError     a server, file or permission is not as needed: stop, exit 1
├── Halt           going on could lose or double something: stop with the reason, exit 3
├── BatchAborted   roll back, find out from the stored facts what was committed, poll again
├── Fenced         another instance owns our work: drop it, recover what is still ours
└── ConnectionLost the database went away: reconnect, then the same as BatchAborted
"""

from __future__ import annotations


class ProcessorError(Exception):
    """Its text is one line for the operator: what is wrong, where, and what to do."""

    exit_code = 1


class ConfigError(ProcessorError):
    """The deployment is described wrongly."""

    exit_code = 2


class SetupError(ProcessorError):
    """A server, a file or a permission is not as needed."""


class Halt(ProcessorError):
    """Going on could lose or double something; only an operator can decide."""

    exit_code = 3


class BatchAborted(ProcessorError):
    """This attempt is void; recovery reads from both systems what became of it."""


class Fenced(ProcessorError):
    """Another instance took over; nothing of ours may be written any more."""


class ConnectionLost(ProcessorError):
    """The database went away; whether the last commit counted is read from the ledger."""


def text_of(error: BaseException) -> str:
    """Its own words. An exception of somebody else's may fail to give any, and must not take more with it for that."""
    try:
        return str(error)
    except Exception as worse:
        return f"(without a text: {type(worse).__name__} in its __str__)"


class Reject(Exception):
    """Raised by a handler: this message is bad and will stay so. It ends as a failed row, the others go on."""


class Retry(Exception):
    """Raised by a handler: not now. The message is tried again, after so many seconds if given."""

    def __init__(self, reason: str = "", after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class Unavailable(Exception):
    """Raised by a handler: what it needs is down. Its partition waits, no attempt is counted, nothing fails."""

    def __init__(self, reason: str = "", after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after
