"""What a subject is told: one JSON file, named by the environment variable BENCH_JOB."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "BENCH_JOB"


@dataclass(frozen=True, slots=True)
class Job:
    bootstrap_servers: str
    database: str
    input: str
    output: str
    group: str
    batch: int = 2000
    linger_ms: int = 20

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2))

    @classmethod
    def read(cls) -> Job:
        return cls(**json.loads(Path(os.environ[VARIABLE]).read_text()))
