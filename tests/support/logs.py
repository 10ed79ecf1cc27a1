"""What an engine inside the test's own process logs."""

from __future__ import annotations

from typing import Any


def events(logs: list[Any], name: str, **expected: Any) -> list[dict[str, Any]]:
    """Those of this name, and with these values, so far."""
    return [
        event
        for event in list(logs)
        if event["event"] == name and all(event.get(key) == value for key, value in expected.items())
    ]
