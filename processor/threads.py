"""How threads that work on many records at a time share the interpreter with the event loop.

The event loop goes first, because Postgres waits for its next statement. A thread that wants the interpreter gets it
when the running one releases it, or after the switch interval, which is long. So the poll and publish threads release
it themselves about every half millisecond.
"""

from __future__ import annotations

import time

# Long enough for a waiting thread to wake up: after a shorter release the same thread would get the interpreter again.
BREATH_SECONDS = 0.00005
# Work on this many records is long enough to release the interpreter after it.
MANY = 256


def breathe() -> None:
    """Release the interpreter to the event loop if it wants it."""
    time.sleep(BREATH_SECONDS)
