"""The demo's error, and a logger that silences its Kafka clients."""

from __future__ import annotations

import logging

# Clients that reach a broker in its first seconds log errors, try again and succeed: not worth showing.
SILENT = logging.Logger("demo", level=logging.CRITICAL + 1)


class DemoError(Exception):
    """The demo cannot go on; the text is one line for the person who watches."""
