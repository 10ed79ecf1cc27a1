"""Builds the parts that the loop works with, once per process."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from processor.engine.crashes import CrashTracker
from processor.engine.failing.attempts import Attempts
from processor.engine.failing.classify import Judge
from processor.engine.failing.conclude import Conclusion
from processor.engine.failing.parking import Parking
from processor.engine.failing.pauses import PartitionPauses
from processor.engine.housekeeping import Housekeeping
from processor.engine.intake import Intake
from processor.engine.orphans import Orphans
from processor.engine.partitions import Partitions
from processor.engine.publishing import PublishQueue
from processor.engine.recoveries import Recoveries
from processor.engine.takeover import Takeover
from processor.engine.transaction import Transactions
from processor.engine.troubles import TroubleNotes
from processor.kafka.producer import TransactionalProducer
from processor.messages import identity
from processor.postgres.deadlocks import DeadlockGate
from processor.postgres.inbox import Inbox
from processor.postgres.ledger import Ledger
from processor.postgres.session import Session
from processor.postgres.slots import MAX_SLOTS, Slot
from processor.retention.member import Retention

if TYPE_CHECKING:
    from processor.engine.job import Job
    from processor.handling.registry import Routes
    from processor.kafka.cluster import Cluster
    from processor.kafka.fixed import FixedAssignment
    from processor.kafka.membership import Membership
    from processor.kafka.reader import PartitionReader
    from processor.observe.events import Emit
    from processor.observe.readiness import Readiness
    from processor.observe.stalls import Stalls
    from processor.settings.schema import Settings


@dataclass(frozen=True, slots=True)
class Parts:
    settings: Settings
    job: Job
    routes: Routes
    stalls: Stalls
    emit: Emit
    reader: PartitionReader
    producer: TransactionalProducer
    slot: Slot
    control: Session
    leases: Session  # renews leases, however long others use `control`
    slots: Session  # its connection holds our slot's lock, so nothing else may break it
    pruning: Session  # its connection holds the lock of the member that is elected, and works beside all others
    judge: Judge
    partitions: Partitions
    transactions: Transactions
    intake: Intake
    parking: Parking
    crashes: CrashTracker
    attempts: Attempts
    pauses: PartitionPauses
    conclusion: Conclusion
    publishing: PublishQueue
    recoveries: Recoveries
    housekeeping: Housekeeping
    orphans: Orphans
    troubles: TroubleNotes
    retention: Retention

    def helpers(self) -> list[Coroutine[Any, Any, None]]:
        """Return the tasks that run beside the loop as long as it runs."""
        helpers = [self.housekeeping.watch_brokers(), self.housekeeping.watch_topics()]
        if self.job.bounded:  # it shares its slot with nobody; leases and retention are the live service's
            return helpers
        helpers.append(self.orphans.watch())
        helpers.append(self.troubles.watch())
        if self.routes.act:
            helpers.append(self.attempts.reap())
        if self.settings.retention.span is not None:
            helpers.append(self.retention.keep_going())
        return helpers

    async def close(self) -> None:
        """Close the connections, after all else: until we have left the group, batches may still be published."""
        await self.producer.close()
        for session in (self.pruning, self.slots, self.leases, self.control):
            await session.close()
        await self.transactions.close()


def build(
    job: Job,
    routes: Routes,
    reader: PartitionReader,
    membership: Membership | FixedAssignment,
    cluster: Cluster,
    readiness: Readiness,
    stalls: Stalls,
    emit: Emit,
) -> Parts:
    settings = job.settings
    roles = ("control", "leases", "slot", "retention")
    control, leases, slots, pruning = (Session(settings, role, retried=True) for role in roles)
    owner = f"{socket.gethostname()}:{os.getpid()}"
    # A lease outlives its owner, so its name must differ from that of a later process with the same id.
    lease_owner = f"{owner}:{uuid.uuid4().hex[:8]}"
    key_of = identity.inbox_key(job.scope)
    gate = DeadlockGate(settings, control)
    claiming = job.claiming(key_of, lease_owner)
    inbox = Inbox(key_of, lease_owner, settings.effects.lease_ms, takes_waiting=not job.bounded)
    ledger = Ledger(job.name, owner)
    slot = Slot(job.name, slots, ledger, 1 if job.bounded else MAX_SLOTS)
    producer = TransactionalProducer(settings.kafka, slot.lease, membership.metadata)
    judge = Judge(settings)
    partitions = Partitions(settings.failure, reader)
    parking = Parking(settings, partitions)
    crashes = CrashTracker(settings, partitions, control, ledger)
    attempts = Attempts(settings, partitions, routes, control, leases, inbox, crashes, parking, stalls, emit)
    pauses = PartitionPauses(settings, partitions, control, inbox, attempts, judge, readiness, emit)
    transactions = Transactions(job, claiming, inbox, ledger, gate, parking, partitions, emit)
    publishing = PublishQueue(settings.batch, partitions, producer, reader.news.set, emit)
    reader.when_leaving = publishing.hurry
    takeover = Takeover(
        settings,
        partitions,
        cluster,
        control,
        ledger,
        slot,
        producer,
        pauses,
        crashes,
        parking,
        identity.inbox_key(settings.consumer),  # ids of outputs are the same in whatever scope their cause is processed
        job.inbox_id,
        emit,
    )
    return Parts(
        settings=settings,
        job=job,
        routes=routes,
        stalls=stalls,
        emit=emit,
        reader=reader,
        producer=producer,
        slot=slot,
        control=control,
        leases=leases,
        slots=slots,
        pruning=pruning,
        judge=judge,
        partitions=partitions,
        transactions=transactions,
        intake=Intake(settings.batch, reader, publishing, readiness),
        parking=parking,
        crashes=crashes,
        attempts=attempts,
        pauses=pauses,
        conclusion=Conclusion(settings, partitions, cluster, job.adapt),
        publishing=publishing,
        recoveries=Recoveries(partitions, takeover, pauses, readiness, reader.news.set, emit),
        housekeeping=Housekeeping(partitions, publishing, ledger, control, cluster, pauses),
        orphans=Orphans(settings.kafka, slots, slot, ledger, emit),
        troubles=TroubleNotes(settings.consumer, partitions, control, slot, emit),
        retention=Retention(settings, pruning, cluster, lambda: reader.has_a_batch, emit),
    )
