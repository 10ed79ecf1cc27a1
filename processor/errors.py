"""Every error the processor raises, named by what happens next.

ProcessorError
├── ConfigError    the configuration is wrong: stop, exit 2
├── SetupError     a server, file or permission is not as required: stop, exit 1
├── Halt           continuing could lose or duplicate something: stop with the reason, exit 3
├── BatchAborted   roll back, read from both systems what was committed, poll again
├── Fenced         another instance owns our work: drop it, recover what is still ours
└── ConnectionLost the database went away: reconnect, then do the same as for BatchAborted
"""

from __future__ import annotations


class ProcessorError(Exception):
    """An error whose text is one line for the operator: what is wrong, where, and what to do."""

    exit_code = 1


class ConfigError(ProcessorError):
    """The configuration of the deployment is wrong."""

    exit_code = 2


class SetupError(ProcessorError):
    """A server, a file or a permission is not as required."""


class Halt(ProcessorError):
    """Continuing could lose or duplicate something; only an operator can decide."""

    exit_code = 3


class BatchAborted(ProcessorError):
    """This attempt is void; recovery reads from Postgres and Kafka how much of it was committed."""


class Fenced(ProcessorError):
    """Another instance took over; this one must not write anything more."""


class ConnectionLost(ProcessorError):
    """The database went away; recovery reads from the ledger whether the last commit took effect."""


def text_of(error: BaseException) -> str:
    """Return the error's own text; a foreign exception whose `__str__` fails must not break the error handling too."""
    try:
        return str(error)
    except Exception as worse:
        return f"(no text: its __str__ raised {type(worse).__name__})"


class Reject(Exception):
    """Raised by a handler: this message will never succeed. It ends as a failed row; the others continue."""


class Retry(Exception):
    """Raised by a handler: not now. The message is tried again, `after` that many seconds if given."""

    def __init__(self, reason: str = "", after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class Unavailable(Exception):
    """Raised by a handler: something it needs is down. The partition waits; no attempt counts and nothing fails."""

    def __init__(self, reason: str = "", after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after
