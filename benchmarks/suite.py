"""Throughput: all subjects take turns, several times, so that a drift of the machine hits all of them alike."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import site as sites
from benchmarks.ceilings import Ceilings
from benchmarks.measure import measure
from benchmarks.results import Results
from benchmarks.show import Show
from benchmarks.site import Site
from benchmarks.subjects import Subject


def begin(site: Site) -> Results:
    return Results(machine=sites.machine(site), settings=site.settings)


def throughput(
    site: Site,
    results: Results,
    subjects: Sequence[Subject],
    records: int,
    repeat: int,
    show: Show,
    *,
    with_ceilings: bool,
) -> None:
    ceilings = Ceilings(site, records, show) if with_ceilings else None
    for repetition in range(repeat):
        # There and back again: no subject always follows the same neighbour.
        for subject in subjects if repetition % 2 == 0 else reversed(subjects):
            results.titles[subject.name] = subject.title
            show.step(f"{subject.name}, {repetition + 1} of {repeat}")
            feed = site.feed(subject.records(records), poison_one_in=subject.poison_one_in)
            run = measure(site, subject, feed, repetition, tell=show.progress)
            results.runs.append(run)
            show.say(f"{subject.name:<12} {_text(run.rate, run.wrong)}")
        if ceilings is not None:
            ceilings.measure(results, repetition)


def _text(rate: float | None, wrong: Sequence[str]) -> str:
    return f"{rate:>9,.0f} msg/s" if rate is not None else f"WRONG: {'; '.join(wrong)}"
