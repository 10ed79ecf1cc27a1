"""The demo's one error, and where the chatter of its Kafka clients goes."""

from __future__ import annotations

import logging

# Clients that reach a broker in its first seconds complain, try again and succeed: nothing to show.
SILENT = logging.Logger("demo", level=logging.CRITICAL + 1)


class DemoError(Exception):
    """The demo cannot go on; its text is one line for the person who watches."""
