"""The peers, without importing any: their libraries are in an environment of their own, made from requirements.txt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
REQUIREMENTS = FOLDER / "requirements.txt"

# Enough for some seconds of steady work.
IN_BATCHES = 300_000
PER_MESSAGE = 2_000


@dataclass(frozen=True, slots=True)
class Peer:
    """A script to run with the environment's Python and BENCH_JOB, until SIGTERM."""

    title: str
    script: Path
    guarantee: str
    records: int


PEERS = {
    "faststream-batch": Peer(
        "FastStream, batches", FOLDER / "faststream_batch.py", "rows once, outputs at least once", IN_BATCHES
    ),
    "quix": Peer(
        "Quix Streams, exactly-once, own sink",
        FOLDER / "quix_batch.py",
        "rows once, outputs once but re-made from the event; a killed process holds readers up",
        IN_BATCHES,
    ),
    "arroyo": Peer("Arroyo, batches", FOLDER / "arroyo_batch.py", "rows once, outputs at least once", IN_BATCHES),
    "faststream-message": Peer(
        "FastStream, per message", FOLDER / "faststream_message.py", "rows once, outputs at least once", PER_MESSAGE
    ),
    "dbos": Peer(
        "DBOS Kafka consumer",
        FOLDER / "dbos_workflow.py",
        "rows once, outputs at least once, in any order",
        PER_MESSAGE,
    ),
}
