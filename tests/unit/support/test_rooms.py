"""The lines that end `make test`."""

from __future__ import annotations

from tests.support.rooms import Room, rooms


def file(lines: int, run: int) -> dict[str, dict[str, int]]:
    return {"summary": {"num_statements": lines, "covered_lines": run}}


def test_files_count_for_their_room_whatever_their_depth() -> None:
    found = rooms(
        {
            "processor/errors.py": file(10, 10),
            "processor/engine/loop.py": file(100, 90),
            "/elsewhere/processor/engine/failing/bisect.py": file(100, 70),
            "processor/kafka/reader.py": file(50, 0),
        }
    )
    assert found == [
        Room("engine/", 200, 160),
        Room("kafka/", 50, 0),
        Room("processor", 10, 10),
        Room("total", 260, 170),
    ]
    assert str(found[0]).split() == ["engine/", "200", "lines", "80.0%", "run", "by", "tests"]


def test_a_room_without_statements_does_not_count() -> None:
    assert rooms({"processor/stack/__init__.py": file(0, 0)}) == []
