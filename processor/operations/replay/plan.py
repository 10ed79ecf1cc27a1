"""What a replay is to do, written down before anything is done: mode, ranges, filters, warnings.

A plan can be saved and run later; it is checked again then (ranges.py makes and checks it).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from processor.errors import ProcessorError
from processor.messages.message import Partition
from processor.postgres.replays import Range


class Mode(StrEnum):
    MISSING = "missing"  # process what the inbox does not have as completed
    RE_EMIT = "re-emit"  # send outputs again
    RE_APPLY = "re-apply"  # process everything again, under a scope of its own
    DRY_RUN = "dry-run"  # change nothing; report what would come out


class Refused(ProcessorError):
    """What was asked for does not exist, or contradicts itself."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which of the records in the ranges; all conditions that are given have to hold."""

    keys: tuple[bytes, ...] = ()
    types: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keys or self.types or self.ids)


@dataclass(frozen=True, slots=True)
class Plan:
    consumer: str
    name: str
    mode: Mode
    ranges: tuple[Range, ...]
    wanted: Wanted = Wanted()
    scope: str | None = None  # of re-apply: messages are done once in it
    outputs: bool = True
    output_topic: str | None = None  # where all outputs go instead
    rate: float | None = None  # records per second
    despite_forgotten: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def records(self) -> int:
        """How many offsets the ranges have: no fewer than there are records."""
        return sum(one.end - one.first for one in self.ranges)

    def as_json(self) -> dict[str, Any]:
        shallow = {field.name: getattr(self, field.name) for field in fields(self)}
        return shallow | {
            "ranges": [_range_as_json(one) for one in self.ranges],
            "wanted": {
                "keys_hex": [key.hex() for key in self.wanted.keys],
                "types": list(self.wanted.types),
                "ids": list(self.wanted.ids),
            },
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Plan:
        """Raise Refused if it is no plan."""
        try:
            wanted = document["wanted"]
            return replace(
                cls(**{name: value for name, value in document.items() if name not in ("ranges", "wanted")}, ranges=()),
                mode=Mode(document["mode"]),
                ranges=tuple(map(_range_from_json, document["ranges"])),
                wanted=Wanted(
                    tuple(bytes.fromhex(key) for key in wanted["keys_hex"]),
                    tuple(wanted["types"]),
                    tuple(wanted["ids"]),
                ),
                warnings=tuple(document["warnings"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"not a plan of `processor replay`: {type(error).__name__}: {error}") from None


def ledger_name(consumer: str, name: str) -> str:
    """The consumer of a replay's ledger rows; also its group and the beginning of its transactional id."""
    return f"{consumer}.replay.{name}"


def _range_as_json(one: Range) -> dict[str, Any]:
    shallow = {field.name: getattr(one, field.name) for field in fields(Range)}
    return {"topic": one.partition.topic} | shallow | {"partition": one.partition.number}


def _range_from_json(document: dict[str, Any]) -> Range:
    return Range(
        **{name: value for name, value in document.items() if name not in ("topic", "partition")},
        partition=Partition(document["topic"], document["partition"]),
    )
