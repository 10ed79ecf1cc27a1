"""The result of the demo in numbers: as lines for people, as JSON for machines."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from demo.verify import Verdict

BETWEEN = "between the two commits"
RANDOM = "at a random moment"


@dataclass(slots=True)
class Kill:
    """One SIGKILL: where it came, what the two systems showed then, and what recovery sent."""

    where: str
    in_postgres: int
    in_kafka: int
    resent: int = 0
    seconds_away: float = 0.0

    @property
    def unsent(self) -> int:
        return max(0, self.in_postgres - self.in_kafka)


@dataclass(slots=True)
class Summary:
    verdict: Verdict
    kills: list[Kill]
    seconds: float

    @property
    def ok(self) -> bool:
        return self.verdict.ok

    def lines(self) -> list[tuple[str, str, str]]:
        """Return name, number and remark of each line."""
        v = self.verdict
        adds_up = "" if v.wrong else "; stock adds up, never oversold"
        kinds = [f"{number} {where}" for where, number in Counter(kill.where for kill in self.kills).items()]
        resent = sum(kill.resent for kill in self.kills)
        lines = [
            ("records in", f"{v.records:,}", f"{v.orders:,} orders, read back from the input topic"),
            ("duplicates", f"{v.duplicates:,}", "repeats: at once, later, in other partitions"),
            ("rows", f"{v.rows:,}", f"reservations in Postgres{adds_up}"),
            (
                "outputs",
                f"{v.outputs:,}",
                f"answers visible in Kafka: {v.reserved:,} reserved, {v.rejected:,} rejected",
            ),
            ("SIGKILLs", f"{len(self.kills)}", ", ".join(kinds)),
            ("repaired", f"{resent:,}", "answers a dead process owed, sent by the next"),
            ("lost", f"{v.lost:,}", "orders without an answer, or reserved without a row"),
            ("doubled", f"{v.doubled:,}", "answers or rows beyond the first of an order"),
        ]
        return lines + [("wrong", "!", text) for text in v.wrong]

    def verdict_line(self) -> str:
        if self.ok:
            return f"exactly once: nothing lost, nothing doubled, in {self.seconds:.0f} s"
        return "NOT exactly once"

    def as_json(self) -> dict[str, Any]:
        numbers = asdict(self.verdict)
        wrong = numbers.pop("wrong")
        return {
            "ok": self.ok,
            "records": numbers.pop("records"),
            "duplicates": self.verdict.duplicates,
            **numbers,
            "wrong": wrong,
            "kills": [asdict(kill) | {"unsent": kill.unsent} for kill in self.kills],
            "seconds": round(self.seconds, 1),
        }
