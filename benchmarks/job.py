"""A subject's instructions: one JSON file, named by the environment variable BENCH_JOB."""

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

    def variables(self, folder: Path) -> dict[str, str]:
        """Write the file into this folder; returns the variable that names it."""
        path = folder / f"{self.group}.json"
        path.write_text(json.dumps(asdict(self), indent=2))
        return {VARIABLE: str(path)}

    @classmethod
    def read(cls) -> Job:
        return cls(**json.loads(Path(os.environ[VARIABLE]).read_text()))
