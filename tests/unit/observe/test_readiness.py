"""Readiness: a file that is there exactly while the process does its work."""

from __future__ import annotations

from pathlib import Path

from processor.observe.readiness import Readiness


def test_file_is_there_while_nothing_obstructs(tmp_path: Path) -> None:
    file = tmp_path / "ready"
    readiness = Readiness(file)
    assert not file.exists()
    readiness.clear("starting")
    assert (readiness.ready, file.exists()) == (True, True)
    readiness.obstruct("database", "down")
    readiness.obstruct("group", "left")
    readiness.clear("database")
    assert (readiness.ready, file.exists()) == (False, False)
    readiness.clear("group")
    assert (readiness.ready, file.exists()) == (True, True)


def test_file_of_a_process_that_ends_does_not_come_back(tmp_path: Path) -> None:
    file = tmp_path / "ready"
    readiness = Readiness(file)
    readiness.clear("starting")
    readiness.obstruct("event loop", "blocked")
    readiness.close()
    readiness.clear("event loop")
    assert not file.exists()
