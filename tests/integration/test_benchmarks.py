"""`make bench` in small: real subjects on real servers, measured and judged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import against, ceilings, distance, recording
from benchmarks import site as sites
from benchmarks.measure import measure
from benchmarks.show import Show
from benchmarks.site import Site
from benchmarks.subjects import BARE, BATCH, SUBJECTS, Subject
from processor.stack import Stack

RECORDS = 5000  # several batches, or there would be no rate
LONGER = 40_000  # takes several looks at how far it is, or there would be no processor time


@pytest.fixture
def site(local_stack: Stack, tmp_path: Path) -> Iterator[Site]:
    with sites.shared(local_stack, tmp_path / "bench") as site:
        yield site
        for feed in site.feeds.values():
            site.cluster.delete(feed.topic)


def test_the_bare_loop_and_the_processor_do_all_of_it_once_and_get_a_rate(site: Site) -> None:
    feed = site.feed(LONGER)
    for subject in (BARE, BATCH):
        run = measure(site, subject, feed, 0)
        assert run.wrong == []
        assert run.rate is not None
        assert run.rate > 0
        assert set(run.cpu) == {"subject", "postgres", "broker"}


def test_poison_is_no_order_and_leaves_a_row(site: Site) -> None:
    (poison,) = [subject for subject in SUBJECTS if subject.poison_one_in]
    feed = site.feed(RECORDS, poison_one_in=poison.poison_one_in)
    assert feed.poison == RECORDS // poison.poison_one_in
    run = measure(site, poison, feed, 0)
    assert run.wrong == []
    assert run.rate is not None


def test_what_the_engine_sends_is_recorded_and_does_the_same_again(site: Site) -> None:
    (recorded,) = recording.record(site, site.feed(RECORDS), 1)
    assert recorded.records == RECORDS
    with ceilings.replica(site, [recorded]) as url:  # whose end is a check
        assert ceilings.replay(url, recorded) > 0


def test_another_revision_runs_from_a_checkout_of_its_own_that_is_gone_afterwards(site: Site) -> None:
    head = against.find("HEAD")
    with against.checked_out(head, site.folder) as tree:  # which asks a process there what it imports
        assert (tree / "processor" / "__main__.py").exists()
        measured = against.throughput(site, tree, head, ["batch"], LONGER, 1, Show())
    assert [one.wrong for one in measured] == [[], []]
    assert {summary.unit: summary.pairs for summary in against.summaries(measured)} == {"msg/s": 1, "µs/msg": 1}
    assert not tree.exists()


def test_postgres_can_be_put_at_a_distance_and_a_batch_says_how_often_it_went_there(site: Site) -> None:
    (form,) = [subject for subject in distance.SUBJECTS if subject.name == "write-fk"]
    near, far = distance.take_turns(site, [form], [3.0], RECORDS, 1, Show())
    assert (near.place, near.wrong, far.place, far.wrong) == ("near", [], "3 ms", [])
    assert far.round_trip_ms >= 3.0
    for one in (near, far):
        assert one.rate is not None
        assert one.batch is not None
        assert one.round_trips["commit"] == 1


def test_a_subject_that_does_nothing_is_wrong_and_gets_no_rate(site: Site) -> None:
    idle = Subject("idle", "ends at once", "benchmarks.errors")
    run = measure(site, idle, site.feed(1000), 0)
    assert run.rate is None
    assert run.wrong == ["ended with exit code 0 after 0 of 1000 outputs: it said nothing"]
