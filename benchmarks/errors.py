"""The harness's one error, and where the chatter of its Kafka clients goes."""

from __future__ import annotations

import logging

# Clients log errors while a broker starts, try again and succeed: nothing worth showing.
SILENT = logging.Logger("benchmarks", level=logging.CRITICAL + 1)


class BenchError(Exception):
    """The benchmark cannot go on; its text is one line for the user."""
