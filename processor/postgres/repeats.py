"""Claims for a replay: most messages are done, and those that wait behind a failed one of their key are left alone.

A batch of nothing but messages that are done is told by a single statement. A replay goes over millions of them:
without this each would get a record, a row that is tried in vain, and a look-up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from processor.postgres.claims import Claiming, Claims, PriorDelivery
from processor.postgres.rows import uuids

if TYPE_CHECKING:
    from asyncpg import Connection
    from asyncpg import Record as Row

    from processor.messages.batch import Batch, Columns
    from processor.messages.record import Record
    from processor.postgres.claims import BusyElsewhere, CutBefore

# OFFSET 0 makes it one look into the index for each key, whatever the table's size and the planner's guess.
DONE = """
    SELECT count(*) FROM unnest($1::uuid[], $2::integer[]) AS m(key, hash)
    CROSS JOIN LATERAL (
        SELECT FROM inbox
        WHERE inbox.key = m.key AND inbox.status = 'completed' AND inbox.payload_hash = m.hash OFFSET 0
    ) AS done
"""


class ClaimingRepeats(Claiming):
    _repeating = True  # whether the batch before was of messages that are done, and of no others

    async def claim(self, connection: Connection[Row], batch: Batch) -> Claims | CutBefore | BusyElsewhere | None:
        if self._repeating and batch.columns is not None and await self._all_done(connection, batch.columns):
            return Claims(skipped={PriorDelivery.REDELIVERY: len(batch)})
        claims = await super().claim(connection, batch)
        self._repeating = isinstance(claims, Claims) and not claims.mine
        return claims

    def _judge(self, record: Record, row: Row) -> PriorDelivery:
        """A replay knows only the keys that were parked when it began, and would run one's messages out of order."""
        verdict = super()._judge(record, row)
        return PriorDelivery.PARKED if verdict is PriorDelivery.UNFINISHED and row["waits"] else verdict

    async def _all_done(self, connection: Connection[Row], columns: Columns) -> bool:
        if not columns.message_type.in_inbox:
            return False
        keys = columns.column("inbox_keys")
        found: int = await connection.fetchval(DONE, uuids(keys), columns.column("checksums"))
        return found == len(keys)
