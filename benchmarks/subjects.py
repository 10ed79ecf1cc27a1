"""The subjects: how each is prepared and started. All of them do the same work."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.job import Job
from benchmarks.processes import ROOT, Command

# The share of the input. Slow subjects get less of it, so that each run takes seconds.
FULL = 1.0
FEWEST_RECORDS = 100


@dataclass(frozen=True, slots=True)
class Subject:
    """A module to run with the job in its environment."""

    name: str
    title: str
    module: str
    share: float = FULL
    poison_one_in: int = 0
    python: str = sys.executable
    tree: Path = ROOT  # the source tree that it is run from: its own modules, handlers and migrations

    def records(self, of: int) -> int:
        """The number of records it gets of an input of this size."""
        return max(FEWEST_RECORDS, int(of * self.share))

    def prepare(self, job: Job, folder: Path) -> Command:
        """The command that starts it; whatever it needs in the database is made here."""
        return Command([self.python, "-m", self.module], job.variables(folder), self.tree)


@dataclass(frozen=True, slots=True)
class Processor(Subject):
    """The real `processor run`, as a user deploys it."""

    module: str = "benchmarks.handlers"
    handler: str = "batch"
    workers: int = 1
    profile: str | None = "throughput"
    same_batch: bool = True  # the batch size of all other subjects instead of the profile's
    concurrency: int = 1
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def prepare(self, job: Job, folder: Path) -> Command:
        config = folder / f"{job.group}.toml"
        config.write_text(self.config(job))
        processor = [self.python, "-m", "processor"]
        logs = {"PROCESSOR_LOG_FORMAT": "json", "PROCESSOR_LOG_LEVEL": "info"}
        environment = {**job.variables(folder), **logs, **self.environment}
        processes.call(Command([*processor, "migrate", str(config)], environment, self.tree))
        return Command([*processor, "run", str(config), "--workers", str(self.workers)], environment, self.tree)

    def config(self, job: Job) -> str:
        top: dict[str, Any] = {"consumer": job.group, "topic": job.input}
        tables: dict[str, dict[str, Any]] = {
            "handlers": {"OrderPlaced": f"{self.module}:{self.handler}"},
            "message": {"id": ["payload:/event_id"]},
            "kafka": {"bootstrap_servers": job.bootstrap_servers},
            "database": {"url": job.database},
            "failure": {"dead_letter_topic": ""},  # failures stay in their rows; no other subject has such a topic
        }
        if self.profile is not None:
            top["profile"] = self.profile
        if self.concurrency > 1:
            top["concurrency"] = self.concurrency
        if self.same_batch:
            tables["batch"] = {"max_messages": job.batch}
        for name, table in self.settings.items():
            tables[name] = tables.get(name, {}) | dict(table)
        lines = [f"{key} = {json.dumps(value)}" for key, value in top.items()]
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
        return "\n".join([*lines, ""])


BARE = Subject("bare", "bare Python loop, arrays", "benchmarks.bare")
BATCH = Processor("batch", "processor, batch handler")
SUBJECTS = (
    BARE,
    BATCH,
    Processor("batch-2", "processor, batch handler, 2 workers", workers=2),
    Processor("objects", "processor, batch handler, a list of messages", handler="objects"),
    Processor("collect", "processor, per message: collect", handler="collect"),
    Processor("write", "processor, per message: write", handler="write", share=0.5),
    Processor(
        "poison",
        "processor, per message: write, 1 % poison",
        handler="write_or_reject",
        share=0.5,
        poison_one_in=100,
    ),
    Processor("execute", "processor, per message: execute", handler="execute", share=0.02),
    Subject("single", "one transaction per record", "benchmarks.single", share=0.0005),
)
