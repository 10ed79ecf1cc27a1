"""Our tables in a schema of their own, beside whatever tables of the same names handlers may use.

search_path cannot do that: whichever schema came first in it would hide the tables of the other one, and a handler's
`ledger` would be ours, or ours the handler's. So search_path stays what the team has made it, which is how the names in
handlers are understood, and our own statements name the schema.
"""

from __future__ import annotations

import re
from functools import lru_cache

# All that migrations/ create, and the table that remembers them.
OURS = ("inbox", "ledger", "unsent", "parked_repeats", "inbox_status", "inbox_key", "processor_migrations")

# `inbox.key` is a column of a table that was named before, and `AS unsent` what a query calls something itself.
_OURS_ALONE = re.compile(rf"(?<!AS )(?<![\w.])(?:{'|'.join(OURS)})(?![\w.])")


@lru_cache(maxsize=1024)
def qualified(sql: str, schema: str) -> str:
    """A statement of ours, with the schema before the name of every table, type and function of ours."""
    return _OURS_ALONE.sub(lambda name: f'"{schema}".{name[0]}', sql)
