"""Whatever a process leaves behind, an archive has what was deleted, and nothing else."""

from __future__ import annotations

import gzip
from pathlib import Path

from processor.retention.archive import Archive, settle


def lines(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_appends_become_one_file_under_its_final_name(tmp_path: Path) -> None:
    archive = Archive(tmp_path, "shop", "00000001")
    assert names(tmp_path) == []
    for part in (["a", "b"], ["c"]):
        archive.counts(archive.append(part), len(part))
    assert names(tmp_path) == [f"{archive.name}.open"]
    assert archive.close() == archive.name
    assert names(tmp_path) == [archive.name]
    assert lines(tmp_path / archive.name) == ["a", "b", "c"]
    assert archive.messages == 3


def test_append_of_a_transaction_that_was_rolled_back_is_gone_with_the_next_one(tmp_path: Path) -> None:
    archive = Archive(tmp_path, "shop", "00000001")
    archive.counts(archive.append(["a"]), 1)
    archive.append(["rolled", "back"])
    archive.counts(archive.append(["b"]), 1)
    archive.append(["rolled back"])
    archive.close()
    assert lines(tmp_path / archive.name) == ["a", "b"]


def test_file_of_which_nothing_counts_is_removed(tmp_path: Path) -> None:
    archive = Archive(tmp_path, "shop", "00000001")
    assert archive.close() is None
    archive.append(["rolled back"])
    assert archive.close() is None
    assert names(tmp_path) == []


def test_what_a_dead_process_left_is_cut_off_where_it_stops_counting(tmp_path: Path) -> None:
    dead = Archive(tmp_path, "shop", "00000001")
    size = dead.append(["a", "b"])
    dead.counts(size, 2)
    dead.append(["not deleted"])
    settle(tmp_path, "shop", {dead.name: size})
    assert names(tmp_path) == [dead.name]
    assert lines(tmp_path / dead.name) == ["a", "b"]


def test_file_of_a_dead_process_that_nobody_counts_is_removed(tmp_path: Path) -> None:
    Archive(tmp_path, "shop", "00000001").append(["not deleted"])
    settle(tmp_path, "shop", {})
    assert names(tmp_path) == []


def test_files_of_other_consumers_and_of_other_people_stay_as_they_are(tmp_path: Path) -> None:
    other = Archive(tmp_path, "shop-eu", "00000001")
    other.append(["theirs"])
    (tmp_path / "notes.open").write_text("theirs")
    settle(tmp_path, "shop", {})
    assert names(tmp_path) == ["notes.open", f"{other.name}.open"]
