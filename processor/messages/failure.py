"""Why a message failed: a stable reason, and the evidence for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Failure:
    """Why a message ends as a failed row. `reason` is a stable name, `detail` is for people.

    Text from outside may hold half a surrogate pair, which has no UTF-8 form. It is escaped here: otherwise the
    evidence could not be stored, and the message would be redelivered for ever.
    """

    reason: str
    detail: str
    traceback: str | None = None
    kind: str = "poison"  # poison, transient or bug
    exception: str | None = None
    sqlstate: str | None = None

    def __post_init__(self) -> None:
        for name in ("detail", "traceback", "exception", "sqlstate"):
            if (text := getattr(self, name)) is not None:
                object.__setattr__(self, name, text.encode(errors="backslashreplace").decode())

    @property
    def way(self) -> tuple[str | None, ...]:
        """What failures of the same way have in common: they differ in their texts only."""
        return self.kind, self.reason, self.exception, self.sqlstate
