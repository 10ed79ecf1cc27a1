"""Our tables in a schema of their own, so that handlers may have tables of the same names.

search_path cannot do that: the schema that comes first in it hides the tables of the other, so a handler's `ledger`
would be ours, or ours the handler's. So search_path stays as the team has set it, and names in handlers mean what they
mean there; our own statements name the schema.
"""

from __future__ import annotations

import re
from functools import lru_cache

# Everything that migrations/ creates, and the table that records them.
OURS = (
    "inbox",
    "ledger",
    "unsent",
    "parked_repeats",
    "replays",
    "replay_ranges",
    "log_ends",
    "forgotten",
    "pruning",
    "archived",
    "partition_trouble",
    "inbox_status",
    "inbox_key",
    "processor_migrations",
)

# Not `inbox` in `inbox.key`, which refers to a table named elsewhere, and not `AS unsent`, a query's own name.
_OURS_ALONE = re.compile(rf"(?<!AS )(?<![\w.])(?:{'|'.join(OURS)})(?![\w.])")


@lru_cache(maxsize=1024)
def qualified(sql: str, schema: str) -> str:
    """One of our statements, with the schema before the name of every table, type and function of ours."""
    return _OURS_ALONE.sub(lambda name: f'"{schema}".{name[0]}', sql)
