"""What every table of settings is made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Milliseconds = Annotated[int, Field(gt=0, le=24 * 60 * 60 * 1000)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]


def refused(keys: Iterable[tuple[str, str]]) -> PydanticCustomError:
    """An error with a reason for each key, relative to the table that is validated."""
    keys = list(keys)
    summary = "; ".join(f"{key} {reason}" for key, reason in keys)
    return PydanticCustomError("refused", "{summary}", {"summary": summary, "refused": keys})
