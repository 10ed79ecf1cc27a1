"""`[retention]`: how long completed messages are remembered."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from processor.settings.table import Table, refused

# A round through the inbox takes place this often while a message is remembered.
ROUNDS = 24


class RetentionSettings(Table):
    """How long the inbox remembers completed messages, after they were last seen: [retention](retention.md)."""

    days: int = Field(
        default=7,
        ge=0,
        le=36_500,
        description="A message that comes again within this time is recognised. Then it is forgotten and its row "
        "goes. 0: the inbox keeps everything.",
    )
    hours: Annotated[int, Field(ge=1, le=24 * 36_500)] | None = Field(
        default=None, description="Instead of `days`, for busy topics."
    )
    pace: int = Field(
        default=20,
        ge=1,
        le=100,
        description="The share of its time, in percent, in which retention works; a quarter of it while the service is "
        "behind.",
    )
    archive: Path | None = Field(
        default=None,
        description="A directory in which rows are kept as compressed lines of JSON before they go. It must exist.",
    )

    @model_validator(mode="after")
    def _one_span(self) -> RetentionSettings:
        if self.hours is not None and "days" in self.model_fields_set:
            raise refused([("hours", "excludes days: give one of them")])
        return self

    @field_validator("archive")
    @classmethod
    def _is_a_directory(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_dir():
            raise ValueError(f"{value}: no such directory")
        return value

    @property
    def span(self) -> timedelta | None:
        """How long messages are remembered; None for ever."""
        if self.hours is not None:
            return timedelta(hours=self.hours)
        return timedelta(days=self.days) if self.days else None

    @property
    def period(self) -> timedelta:
        """How often the inbox is gone through: rows are kept for so much longer than the span."""
        return (self.span or timedelta(days=1)) / ROUNDS

    @property
    def grain(self) -> timedelta | None:
        """A completed message that comes again is noted if it was last seen longer ago than this."""
        return None if self.span is None else min(self.period, timedelta(hours=1))
