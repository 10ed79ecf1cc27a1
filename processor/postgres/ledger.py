"""The ledger: each partition's owner, and how far its work is committed; and the outputs that Kafka may not have yet.

The SQL of the tables ledger and unsent is here. The epoch is the fence on the Postgres side: a new owner raises
it, and then `advance` with an older epoch matches no row. All statements lock rows in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from processor.messages.message import Partition

if TYPE_CHECKING:
    from asyncpg import Connection
    from asyncpg import Record as Row

    from processor.messages.positions import Log

# Waits for a predecessor's open transaction that has locked its ledger rows, and shuts out its later ones.
RAISE_EPOCH = """
    WITH mine AS (
        SELECT l.topic, l.partition, p.at_least, p.alive FROM ledger l
        JOIN unnest($2::text[], $3::integer[], $4::bigint[], $6::boolean[]) AS p(topic, partition, at_least, alive)
             ON l.topic = p.topic AND l.partition = p.partition
        WHERE l.consumer = $1
        ORDER BY l.topic, l.partition FOR UPDATE OF l
    )
    UPDATE ledger l SET epoch = greatest(l.epoch, mine.at_least) + 1, owner = $5, slot = $7, updated_at = now(),
                        deaths = CASE WHEN l.in_progress IS NULL OR mine.alive THEN l.deaths
                                      WHEN l.in_progress = l.suspects THEN l.deaths + 1 ELSE 1 END,
                        suspects = CASE WHEN mine.alive THEN l.suspects ELSE coalesce(l.in_progress, l.suspects) END,
                        in_progress = NULL
    FROM mine WHERE l.consumer = $1 AND l.topic = mine.topic AND l.partition = mine.partition
    RETURNING l.topic, l.partition, l.epoch, l.topic_id, l.first_offset, l.next_offset,
              l.partition_id, l.unfinished_owners, l.suspects, l.deaths, l.first_epoch
"""

# A separate statement after the one above: only so it sees what a predecessor committed while that one waited.
UNSENT = """
    SELECT partition_id, outputs FROM unsent WHERE partition_id = ANY ($1::integer[]) ORDER BY partition_id, next_offset
"""

SLOTS = "SELECT DISTINCT slot FROM ledger WHERE consumer = $1 AND slot IS NOT NULL"

# Skips rows that another process is taking over: they get another slot.
FORGET_SLOT = """
    WITH its AS (
        SELECT topic, partition FROM ledger WHERE consumer = $1 AND slot = $2
        ORDER BY topic, partition FOR UPDATE SKIP LOCKED
    )
    UPDATE ledger l SET slot = NULL FROM its
    WHERE l.consumer = $1 AND l.topic = its.topic AND l.partition = its.partition
"""

CREATE = """
    INSERT INTO ledger (consumer, topic, partition, epoch, topic_id, partitions, first_offset, next_offset, owner, slot)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $7, $8, $9)
    ON CONFLICT DO NOTHING RETURNING partition_id
"""

MET = """
    SELECT topic_id, min(partitions) AS partitions FROM ledger
    WHERE consumer = $1 AND topic = ANY ($2::text[]) GROUP BY topic_id
"""

# Runs before an owner's first batch: an owner that dies at it leaves the count behind, one that lives takes it back.
BEGIN_WORK = """
    UPDATE ledger l SET unfinished_owners = greatest(0, l.unfinished_owners + $5)
    FROM unnest($2::text[], $3::integer[], $4::bigint[]) AS p(topic, partition, epoch)
    WHERE l.consumer = $1 AND l.topic = p.topic AND l.partition = p.partition AND l.epoch = p.epoch
"""

# It has to survive only the death of this process, so it need not be on disk.
MARK_IN_PROGRESS = """
    WITH unhurried AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))
    UPDATE ledger SET in_progress = CASE WHEN $5::bigint IS NOT NULL THEN int8range($5, $6) END FROM unhurried
    WHERE consumer = $1 AND topic = $2 AND partition = $3 AND epoch = $4
"""

# Only the current owner may delete: after a rewind the same offsets may have outputs that are still to be sent.
MARK_SENT = """
    DELETE FROM unsent u
    USING ledger l JOIN unnest($1::integer[], $2::bigint[], $3::bigint[]) AS p(partition_id, epoch, published)
          ON l.partition_id = p.partition_id AND l.epoch = p.epoch
    WHERE u.partition_id = l.partition_id AND u.next_offset <= p.published
"""

# It deletes outputs only when Kafka is known to have them.
ADVANCE = f"""
    WITH mine AS (
        SELECT l.partition_id, b.published, b.next, b.outputs, b.cautious FROM ledger l
        JOIN unnest($5::text[], $6::integer[], $7::bigint[], $8::bigint[], $9::bigint[], $10::bytea[], $11::boolean[],
                    $12::bigint[])
             AS b(topic, partition, epoch, first, next, outputs, cautious, published)
             ON l.topic = b.topic AND l.partition = b.partition AND l.epoch = b.epoch AND l.next_offset = b.first
        WHERE l.consumer = $4
        ORDER BY l.topic, l.partition FOR UPDATE OF l
    ), kept AS (
        INSERT INTO unsent (partition_id, next_offset, outputs)
        SELECT partition_id, next, outputs FROM mine WHERE outputs IS NOT NULL
    ), sent AS ({MARK_SENT})
    UPDATE ledger l SET first_offset = mine.published, next_offset = mine.next,
                        updated_at = now(),
                        unfinished_owners = CASE WHEN mine.cautious THEN l.unfinished_owners ELSE 0 END,
                        deaths = CASE WHEN upper(l.suspects) <= mine.next THEN 0 ELSE l.deaths END,
                        suspects = CASE WHEN upper(l.suspects) <= mine.next THEN NULL ELSE l.suspects END
    FROM mine WHERE l.partition_id = mine.partition_id
    RETURNING l.topic, l.partition
"""  # noqa: S608 - a constant of ours

# Only an operator's change moves positions without a batch, back or ahead; the stored outputs were sent before.
REPOSITION = """
    WITH moved AS (
        UPDATE ledger SET first_offset = $5, next_offset = $5, updated_at = now()
        WHERE consumer = $1 AND topic = $2 AND partition = $3 AND epoch = $4
        RETURNING partition_id
    ), sent AS (
        DELETE FROM unsent u USING moved WHERE u.partition_id = moved.partition_id
    )
    SELECT partition_id FROM moved
"""


@dataclass(frozen=True, slots=True)
class LedgerRow:
    epoch: int
    topic_id: str
    first_offset: int
    next_offset: int
    partition_id: int
    unsent: Sequence[bytes] = ()  # outputs of batches that Kafka is not known to have, in their order
    unfinished_owners: int = 0  # owners that began to work since a batch was last committed
    suspects: range | None = None  # the offsets that were in progress when the last owner died
    deaths: int = 0  # owners in a row that died at exactly those offsets
    first_epoch: int = 0  # offsets committed under an older epoch belong to an earlier topic of the same name


@dataclass(frozen=True, slots=True)
class Advance:
    """One partition's share of a batch."""

    partition: Partition
    epoch: int
    first_offset: int
    next_offset: int
    outputs: bytes | None
    published: int  # everything below is known to be in Kafka
    cautious: bool = False  # the search for the record that killed our predecessors goes on


class Sent(NamedTuple):
    """Up to where Kafka is known to have the outputs of a partition."""

    partition_id: int
    epoch: int
    published: int


class Ledger:
    def __init__(self, consumer: str, owner: str) -> None:
        self.consumer = consumer
        self._owner = owner

    async def slots(self, connection: Connection[Row]) -> set[int]:
        """Return the slots of owners, including dead ones."""
        return {row["slot"] for row in await connection.fetch(SLOTS, self.consumer)}

    async def forget_slot(self, connection: Connection[Row], slot: int) -> None:
        """Forget a dead owner's slot: its transaction was ended."""
        await connection.execute(FORGET_SLOT, self.consumer, slot)

    async def raise_epochs(
        self,
        connection: Connection[Row],
        at_least: Mapping[Partition, int],
        slot: int,
        alive: Collection[Partition] = (),
    ) -> dict[Partition, LedgerRow]:
        """Become the owner; partitions without a row are absent from the answer.

        `at_least` is the newest epoch seen in Kafka: a restored database must not hand out old ones again. On
        partitions in `alive` we were the owner ourselves, so nobody died there.
        """
        rows = await connection.fetch(
            RAISE_EPOCH,
            self.consumer,
            [partition.topic for partition in at_least],
            [partition.number for partition in at_least],
            list(at_least.values()),
            self._owner,
            [partition in alive for partition in at_least],
            slot,
        )
        unsent: dict[int, list[bytes]] = {row["partition_id"]: [] for row in rows}
        for partition_id, outputs in await connection.fetch(UNSENT, list(unsent)):
            unsent[partition_id].append(outputs)
        return {
            Partition(row["topic"], row["partition"]): LedgerRow(
                row["epoch"],
                row["topic_id"],
                row["first_offset"],
                row["next_offset"],
                row["partition_id"],
                unsent[row["partition_id"]],
                row["unfinished_owners"],
                row["suspects"] and range(row["suspects"].lower, row["suspects"].upper),
                row["deaths"],
                row["first_epoch"],
            )
            for row in rows
        }

    async def met(self, connection: Connection[Row], topics: Collection[str]) -> dict[str, int]:
        """Return by topic id how many partitions these topics had when this consumer first read them."""
        return {row["topic_id"]: row["partitions"] for row in await connection.fetch(MET, self.consumer, list(topics))}

    async def create(
        self, connection: Connection[Row], partition: Partition, epoch: int, slot: int, log: Log, start: int
    ) -> int | None:
        """Make the first row of a partition; return its partition_id, or None if another owner has made it already."""
        partition_id: int | None = await connection.fetchval(
            CREATE,
            self.consumer,
            partition.topic,
            partition.number,
            epoch,
            log.topic_id,
            log.partitions,
            start,
            self._owner,
            slot,
        )
        return partition_id

    async def begin_work(
        self, connection: Connection[Row], begun: Iterable[tuple[Partition, int]], count: int = 1
    ) -> None:
        """Count the start of work on these partitions, each with its epoch, or with -1 take it back."""
        begun = list(begun)
        await connection.execute(
            BEGIN_WORK,
            self.consumer,
            [partition.topic for partition, _ in begun],
            [partition.number for partition, _ in begun],
            [epoch for _, epoch in begun],
            count,
        )

    async def mark_in_progress(
        self, connection: Connection[Row], partition: Partition, epoch: int, offsets: range | None
    ) -> None:
        """Mark the records that are being handled; None if none is."""
        first, end = (offsets.start, offsets.stop) if offsets else (None, None)
        await connection.execute(MARK_IN_PROGRESS, self.consumer, partition.topic, partition.number, epoch, first, end)

    async def advance(
        self, connection: Connection[Row], batch: Sequence[Advance], sent: Sequence[Sent]
    ) -> set[Partition]:
        """Record a batch in the open transaction; a partition missing from the answer has another owner.

        Also deletes stored outputs that were `sent`, of these and other partitions.
        """
        rows = await connection.fetch(
            ADVANCE,
            *_columns(sent),
            self.consumer,
            [share.partition.topic for share in batch],
            [share.partition.number for share in batch],
            [share.epoch for share in batch],
            [share.first_offset for share in batch],
            [share.next_offset for share in batch],
            [share.outputs for share in batch],
            [share.cautious for share in batch],
            [share.published for share in batch],
        )
        return {Partition(row["topic"], row["partition"]) for row in rows}

    async def reposition(self, connection: Connection[Row], partition: Partition, epoch: int, offset: int) -> bool:
        found = await connection.fetchval(REPOSITION, self.consumer, partition.topic, partition.number, epoch, offset)
        return found is not None

    async def mark_sent(self, connection: Connection[Row], sent: Sequence[Sent]) -> None:
        """Delete stored outputs that Kafka is known to have."""
        await connection.execute(MARK_SENT, *_columns(sent))


def _columns(sent: Sequence[Sent]) -> tuple[list[int], list[int], list[int]]:
    return [one.partition_id for one in sent], [one.epoch for one in sent], [one.published for one in sent]
