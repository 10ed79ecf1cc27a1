"""Whatever a process leaves behind, an archive has what was deleted, and nothing else."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from processor.retention.archive import Archive, left_open, settle

Make = Callable[[str], Archive]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes the archive of a consumer; it ends with the test at the latest."""
    with ExitStack() as made:

        def new(consumer: str) -> Archive:
            archive = Archive(tmp_path, consumer, "00000001")
            made.callback(archive.release)
            return archive

        yield new


def lines(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_appends_become_one_file_under_its_final_name(make: Make, tmp_path: Path) -> None:
    archive = make("shop")
    assert names(tmp_path) == []
    for part in (["a", "b"], ["c"]):
        archive.counts(archive.append(part), len(part))
    assert names(tmp_path) == [f"{archive.name}.open"]
    assert archive.close() == archive.name
    assert names(tmp_path) == [archive.name]
    assert lines(tmp_path / archive.name) == ["a", "b", "c"]
    assert archive.messages == 3


def test_append_of_a_transaction_that_was_rolled_back_is_gone_with_the_next_one(make: Make, tmp_path: Path) -> None:
    archive = make("shop")
    archive.counts(archive.append(["a"]), 1)
    archive.append(["rolled", "back"])
    archive.counts(archive.append(["b"]), 1)
    archive.append(["rolled back"])
    archive.close()
    assert lines(tmp_path / archive.name) == ["a", "b"]


def test_file_of_which_nothing_counts_is_removed(make: Make, tmp_path: Path) -> None:
    archive = make("shop")
    assert archive.close() is None
    archive.append(["rolled back"])
    assert archive.close() is None
    assert names(tmp_path) == []


def settle_all(folder: Path, sizes: dict[str, int]) -> None:
    settle(folder, {name: sizes.get(name, 0) for name in left_open(folder, "shop")})


def test_what_a_dead_process_left_is_cut_off_where_it_stops_counting(make: Make, tmp_path: Path) -> None:
    dead = make("shop")
    size = dead.append(["a", "b"])
    dead.counts(size, 2)
    dead.append(["not deleted"])
    dead.release()
    settle_all(tmp_path, {dead.name: size})
    assert names(tmp_path) == [dead.name]
    assert lines(tmp_path / dead.name) == ["a", "b"]


def test_file_of_a_dead_process_that_nobody_counts_is_removed(make: Make, tmp_path: Path) -> None:
    dead = make("shop")
    dead.append(["not deleted"])
    dead.release()
    settle_all(tmp_path, {})
    assert names(tmp_path) == []


def test_process_that_was_frozen_while_others_went_on_loses_nothing_of_its_file(make: Make, tmp_path: Path) -> None:
    frozen = make("shop")
    size = frozen.append(["a", "b"])
    frozen.counts(size, 2)
    settle_all(tmp_path, {frozen.name: size})
    assert names(tmp_path) == [f"{frozen.name}.open"]
    frozen.append(["rolled back, as another process has taken over"])
    frozen.release()
    settle_all(tmp_path, {frozen.name: size})
    assert names(tmp_path) == [frozen.name]
    assert lines(tmp_path / frozen.name) == ["a", "b"]


def test_process_that_was_frozen_before_its_first_row_makes_no_file_a_second_time(make: Make, tmp_path: Path) -> None:
    archive = make("shop")
    archive.append(["rolled back"])
    (tmp_path / f"{archive.name}.open").unlink()
    archive.append(["rolled back"])
    assert names(tmp_path) == []
    assert archive.close() is None


def test_name_that_is_taken_is_never_written_over(make: Make, tmp_path: Path) -> None:
    dead = make("shop")
    size = dead.append(["b"])
    dead.release()
    (tmp_path / dead.name).write_text("a")
    with pytest.raises(FileExistsError):
        settle_all(tmp_path, {dead.name: size})
    assert (tmp_path / dead.name).read_text() == "a"


def test_death_between_the_two_names_of_a_file_is_brought_in_order(make: Make, tmp_path: Path) -> None:
    dead = make("shop")
    size = dead.append(["a"])
    dead.release()
    (tmp_path / dead.name).hardlink_to(tmp_path / f"{dead.name}.open")
    settle_all(tmp_path, {dead.name: size})
    assert names(tmp_path) == [dead.name]
    assert lines(tmp_path / dead.name) == ["a"]


def test_files_of_other_consumers_and_of_other_people_are_not_ours(make: Make, tmp_path: Path) -> None:
    for consumer in ("shop-eu", "shop"):
        make(consumer).append(["row"])
    (tmp_path / "notes.open").write_text("theirs")
    assert [name.rpartition("-")[0].rpartition("-")[0] for name in left_open(tmp_path, "shop")] == ["shop"]
