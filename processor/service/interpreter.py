"""Sets up the interpreter for thousands of records in flight, and lets its threads share it.

The event loop has priority, because Postgres waits for its next statement. A thread that wants the interpreter gets it
when the running thread releases it, or after SWITCH_SECONDS. That is long, so that the event loop is rarely
interrupted; the other threads release it themselves (threads.py).
"""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress

SWITCH_SECONDS = 0.02
# With the interpreter's default, garbage collection scans all records in flight far too often.
GC_THRESHOLD = 50_000
# From malloc.h; the manual explains them under these names.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
# Free memory up to this is not returned to the system.
KEPT_BYTES = 67_108_864


def tune() -> None:
    """Tune garbage collection, thread switching and malloc. Call it before there are other threads."""
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    sys.setswitchinterval(SWITCH_SECONDS)
    _tune_malloc()


def _tune_malloc() -> None:
    """Tune glibc's malloc, which is slow when one thread allocates messages and another frees them.

    Its default, an arena for each thread, doubles the cost of producing. And the next batch needs the memory again that
    the last one has freed.
    """
    with suppress(OSError, AttributeError):  # a system without mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES // 2)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
