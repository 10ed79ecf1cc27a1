"""How the interpreter is set up for thousands of records in flight, and how its threads share it.

The event loop goes first: Postgres waits for what it does next. A thread that wants the interpreter gets it when the
one that has it lets go, or after SWITCH_SECONDS. That is long, so that the event loop is seldom interrupted. The other
threads, which work ahead of it or behind it, let go by themselves every half of a millisecond or so: see `breathe`.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from contextlib import suppress

SWITCH_SECONDS = 0.02
# Long enough for a thread that waits to be woken up: who only lets go for an instant has the interpreter again before.
BREATH_SECONDS = 0.00005
# So many records at a time are worth it.
MANY = 256
# The interpreter's default looks through everything in flight far too often.
GC_THRESHOLD = 50_000
# Of malloc.h; the names are the manual's.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
# So much that is free is not given back to the system.
KEPT_BYTES = 67_108_864


def tune() -> None:
    """Before there are any other threads."""
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    sys.setswitchinterval(SWITCH_SECONDS)
    _tune_malloc()


def breathe() -> None:
    """Let the event loop have the interpreter if it wants it. For other threads, in the middle of many records."""
    time.sleep(BREATH_SECONDS)


def _tune_malloc() -> None:
    """Where it is glibc's. Memory of messages that one thread takes and another gives back is its weak spot.

    An arena for each thread, its default, makes producing twice as dear; and what a batch has given back is wanted
    again by the next one.
    """
    with suppress(OSError, AttributeError):  # a system without mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES // 2)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
