"""One row per partition: who owns it and how far its work is committed; and the outputs that Kafka may not have yet.

All SQL of the tables ledger and unsent is here. The epoch is the fence on the Postgres side: a new owner raises it, and
`advance` of anybody with an older one matches no row. Rows are locked in one order everywhere.
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

# Waits for a predecessor's open transaction where it has reached its ledger rows, and shuts out its next one.
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

# A statement of its own, behind the one above: only so it sees what a predecessor committed while that one waited.
UNSENT = """
    SELECT partition_id, outputs FROM unsent WHERE partition_id = ANY ($1::integer[]) ORDER BY partition_id, next_offset
"""

SLOTS = "SELECT DISTINCT slot FROM ledger WHERE consumer = $1 AND slot IS NOT NULL"

# Not of rows that somebody is just taking over: they get another one.
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

# Before the first batch of an owner: whoever dies of it leaves this behind, whoever lives takes it back.
BEGIN_WORK = """
    UPDATE ledger l SET unfinished_owners = greatest(0, l.unfinished_owners + $5)
    FROM unnest($2::text[], $3::integer[], $4::bigint[]) AS p(topic, partition, epoch)
    WHERE l.consumer = $1 AND l.topic = p.topic AND l.partition = p.partition AND l.epoch = p.epoch
"""

# Survives the death of a process, which is all it is for, and so need not be on disk.
MARK_IN_PROGRESS = """
    WITH unhurried AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))
    UPDATE ledger SET in_progress = CASE WHEN $5::bigint IS NOT NULL THEN int8range($5, $6) END FROM unhurried
    WHERE consumer = $1 AND topic = $2 AND partition = $3 AND epoch = $4
"""

# Not for whoever is no longer the owner: after a rewind the same offsets may have outputs that are yet to be sent.
MARK_SENT = """
    DELETE FROM unsent u
    USING ledger l JOIN unnest($1::integer[], $2::bigint[], $3::bigint[]) AS p(partition_id, epoch, published)
          ON l.partition_id = p.partition_id AND l.epoch = p.epoch
    WHERE u.partition_id = l.partition_id AND u.next_offset <= p.published
"""

# Outputs are forgotten here when Kafka is known to have them, and never before.
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

# Positions move back or ahead only here, by an operator's doing; outputs are gone because they were sent.
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
    unfinished_owners: int = 0  # that began to work since a batch was last committed
    suspects: range | None = None  # the offsets that were in progress when the last owner died
    deaths: int = 0  # of owners in a row, at just those offsets
    first_epoch: int = 0  # offsets committed under an older one are of another topic, which had the name before


@dataclass(frozen=True, slots=True)
class Advance:
    """One partition's share of a batch."""

    partition: Partition
    epoch: int
    first_offset: int
    next_offset: int
    outputs: bytes | None
    published: int  # everything below is known to be in Kafka
    cautious: bool = False  # still looking for the record that killed our predecessors


class Sent(NamedTuple):
    """Below which position Kafka is known to have the outputs of a partition."""

    partition_id: int
    epoch: int
    published: int


class Ledger:
    def __init__(self, consumer: str, owner: str) -> None:
        self._consumer = consumer
        self._owner = owner

    async def slots(self, connection: Connection[Row]) -> set[int]:
        """Of those who own partitions, or did when they died."""
        return {row["slot"] for row in await connection.fetch(SLOTS, self._consumer)}

    async def forget_slot(self, connection: Connection[Row], slot: int) -> None:
        """Nothing is left of whoever had it."""
        await connection.execute(FORGET_SLOT, self._consumer, slot)

    async def raise_epochs(
        self,
        connection: Connection[Row],
        at_least: Mapping[Partition, int],
        slot: int,
        alive: Collection[Partition] = (),
    ) -> dict[Partition, LedgerRow]:
        """Become the owner; partitions without a row are absent from the answer.

        `at_least` is the newest epoch seen in Kafka: a restored database must not hand out old ones again. Who was
        at work on those that are `alive` has not died: it is us.
        """
        rows = await connection.fetch(
            RAISE_EPOCH,
            self._consumer,
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
        """How many partitions these topics had when this consumer first met them, by topic id."""
        return {row["topic_id"]: row["partitions"] for row in await connection.fetch(MET, self._consumer, list(topics))}

    async def create(
        self, connection: Connection[Row], partition: Partition, epoch: int, slot: int, log: Log, start: int
    ) -> int | None:
        """The first row of a partition; gives its partition_id, or None if another owner was faster."""
        partition_id: int | None = await connection.fetchval(
            CREATE,
            self._consumer,
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
        """Count the start of work on these, or with -1 take it back: (partition, epoch)."""
        begun = list(begun)
        await connection.execute(
            BEGIN_WORK,
            self._consumer,
            [partition.topic for partition, _ in begun],
            [partition.number for partition, _ in begun],
            [epoch for _, epoch in begun],
            count,
        )

    async def mark_in_progress(
        self, connection: Connection[Row], partition: Partition, epoch: int, offsets: range | None
    ) -> None:
        """Put on record which records are being handled now; None when none is."""
        first, end = (offsets.start, offsets.stop) if offsets else (None, None)
        await connection.execute(MARK_IN_PROGRESS, self._consumer, partition.topic, partition.number, epoch, first, end)

    async def advance(
        self, connection: Connection[Row], batch: Sequence[Advance], sent: Sequence[Sent]
    ) -> set[Partition]:
        """Record a batch in the open transaction; a partition missing from the answer has another owner.

        Stored outputs that were `sent`, of whichever partition, are forgotten.
        """
        rows = await connection.fetch(
            ADVANCE,
            *_columns(sent),
            self._consumer,
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
        found = await connection.fetchval(REPOSITION, self._consumer, partition.topic, partition.number, epoch, offset)
        return found is not None

    async def mark_sent(self, connection: Connection[Row], sent: Sequence[Sent]) -> None:
        """Forget outputs that Kafka is known to have."""
        await connection.execute(MARK_SENT, *_columns(sent))


def _columns(sent: Sequence[Sent]) -> tuple[list[int], list[int], list[int]]:
    return [one.partition_id for one in sent], [one.epoch for one in sent], [one.published for one in sent]
