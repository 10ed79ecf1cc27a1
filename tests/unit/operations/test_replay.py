"""Plans of replays, their pace, and how outputs are compared: what needs no server."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from processor.cli.arguments import WrongUse
from processor.cli.replay.options import PlanOptions, RangeOptions
from processor.errors import Halt
from processor.kafka.published import Scanned
from processor.messages.message import Partition
from processor.messages.outputs import Outgoing
from processor.messages.positions import CommittedOffset, Log, metadata
from processor.operations.replay import ranges, reset
from processor.operations.replay.comparison import Comparer
from processor.operations.replay.pace import Pace, Stand, falls_behind
from processor.operations.replay.plan import Mode, Plan, Refused, Wanted
from processor.operations.replay.ranges import Facts
from processor.postgres.replays import Live, Range
from tests.support.configuration import settings, toml

ORDERS = Partition("orders", 0)
RANGE = Range(ORDERS, "topic-1", 4, 7, 10, 20, 50, 50)
PLAN = Plan("inventory", "again", Mode.MISSING, (RANGE,), Wanted((b"\xff",), ("T",), ("a",)), rate=2.5)
ACTING = toml(handlers='OrderPlaced = { call = "handlers.inventory:reserve", effect = true }')


def facts(*, committed: CommittedOffset | None = None, position: int = 50, first_epoch: int = 0) -> Facts:
    return Facts(
        {ORDERS: Log("topic-1", 5, 100, 4)},
        {ORDERS: 90},
        {ORDERS: committed},
        {ORDERS: Live("topic-1", position, 7, first_epoch)},
        {},
    )


def test_a_saved_plan_is_the_same_plan() -> None:
    assert Plan.from_json(PLAN.as_json()) == PLAN


@pytest.mark.parametrize("document", [{}, {"consumer": "c"}, PLAN.as_json() | {"mode": "else"}, {"ranges": 1}])
def test_what_is_no_plan_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(Refused, match="not a plan"):
        Plan.from_json(document)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mode": Mode.RE_APPLY}, "needs --scope"),
        ({"scope": "s"}, "are for --mode re-apply"),
        ({"mode": Mode.RE_APPLY, "scope": "s", "outputs": False, "output_topic": "t"}, "exclude each other"),
        ({"mode": Mode.RE_APPLY, "scope": "s", "output_topic": "orders"}, "an endless loop"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=says):
        ranges.check(settings(tmp_path), replace(PLAN, **changes), facts())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("offset", "text", "silent"),
    [
        (50, metadata(3), range(50, 50)),
        (70, metadata(3), range(50, 70)),  # the database has lost what was committed
        (70, "moved by hand", range(50, 50)),
        (70, metadata(3, sent=60), range(50, 50)),
        (70, metadata(1), range(50, 50)),  # of an earlier topic
    ],
)
def test_outputs_are_held_back_only_where_our_own_offset_says_that_they_were_sent(
    offset: int, text: str, silent: range
) -> None:
    found = ranges._range(ORDERS, facts(committed=CommittedOffset(offset, text), first_epoch=2), 0, 90)
    assert found.silent == silent


@pytest.mark.parametrize(
    ("asked", "committed", "left", "says"),
    [
        ((10, 90), 50, [(10, 50)], ["ends at 50"]),
        ((10, 40), 50, [(10, 40)], []),
        ((60, 90), 50, [], ["ends at 50"]),
        ((10, 90), 70, [(50, 70)], ["ends at 70", "behind Kafka"]),  # what it has as failed may be redriven below 70
        ((10, 40), 70, [], []),
    ],
)
def test_what_is_missing_is_below_the_service_and_only_what_was_lost_in_a_database_that_is_behind(
    asked: tuple[int, int], committed: int, left: list[tuple[int, int]], says: list[str], tmp_path: Path
) -> None:
    known = facts(committed=CommittedOffset(committed, metadata(3)))
    plan = replace(PLAN, ranges=(ranges._range(ORDERS, known, *asked),))
    found = ranges.check(settings(tmp_path), plan, known)
    assert [(one.first, one.end) for one in found.ranges] == left
    assert len(found.warnings) == len(says)
    assert all(text in warning for text, warning in zip(says, found.warnings, strict=True))


def test_a_database_that_is_behind_is_left_to_the_service_where_keys_are_parked(tmp_path: Path) -> None:
    known = facts(committed=CommittedOffset(70, metadata(3)))
    plan = replace(PLAN, ranges=(ranges._range(ORDERS, known, 10, 90),))
    with pytest.raises(Refused, match="reapply"):
        ranges.check(settings(tmp_path, toml(tables='[failure]\npolicy = "park-key"')), plan, known)


@pytest.mark.parametrize(
    "wrong",
    [
        RangeOptions(),
        RangeOptions(all_=True, since="2h"),
        RangeOptions(partition=["0"]),
        RangeOptions(partition=["0:1-2"], since="2h"),
        RangeOptions(from_=1, since="2h"),
        RangeOptions(partition=["zero"]),
    ],
)
def test_ranges_that_say_nothing_or_too_much_are_refused(wrong: RangeOptions, tmp_path: Path) -> None:
    with pytest.raises(WrongUse):
        wrong.bounds(settings(tmp_path))


def test_partitions_have_their_own_bounds_or_those_of_all(tmp_path: Path) -> None:
    own = RangeOptions(partition=["0:5-", "orders/1:-9"]).bounds(settings(tmp_path))
    assert own.partitions == {ORDERS: (5, None), Partition("orders", 1): (None, 9)}
    shared = RangeOptions(partition=["0"], from_=3).bounds(settings(tmp_path))
    assert shared.partitions == {ORDERS: (3, None)}


def test_a_name_that_no_group_could_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="must be 1 to 60"):
        PlanOptions(name="no/slash").plan(settings(tmp_path))


@pytest.mark.parametrize(
    ("before", "now", "behind"),
    [
        (Stand(500, 10), Stand(900, 20), True),
        (Stand(500, 10), Stand(400, 20), False),  # it catches up
        (Stand(500, 10), Stand(900, 10), False),  # it does not run
        (Stand(5, 10), Stand(90, 20), False),  # less than a batch
    ],
)
def test_a_replay_stands_still_while_the_service_works_and_falls_behind(
    before: Stand, now: Stand, behind: bool
) -> None:
    assert falls_behind(before, now, 100) is behind


async def test_a_rate_makes_small_batches_and_waiting_ends_when_it_is_stopped() -> None:
    pace = Pace(10)
    assert pace.largest_batch(1000) == 2
    waits = [pace.waits]
    pace.took(10_000)
    waits.append(pace.waits)
    turn = asyncio.create_task(pace.turn())
    await asyncio.sleep(0)
    pace.stop()
    await turn
    assert [*waits, pace.waits] == [False, True, False]


@pytest.mark.parametrize("mode", [Mode.RE_EMIT, Mode.RE_APPLY, Mode.DRY_RUN])
def test_handlers_that_act_on_other_systems_are_refused_unless_others_are_chosen(mode: Mode, tmp_path: Path) -> None:
    plan = replace(PLAN, mode=mode, scope="s" if mode is Mode.RE_APPLY else None)
    ranges.check(settings(tmp_path, ACTING), plan, facts())
    with pytest.raises(Refused, match=r"handlers\.OrderPlaced acts on other systems"):
        ranges.check(settings(tmp_path, ACTING), replace(plan, wanted=Wanted()), facts())


async def test_a_replay_that_is_held_waits_for_its_turn_until_it_is_let_go() -> None:
    pace = Pace(None)
    pace.hold(held=True)
    turn = asyncio.create_task(pace.turn())
    await asyncio.sleep(0)
    assert (pace.yields, turn.done()) == (True, False)
    pace.hold(held=False)
    await turn


async def test_a_replay_that_was_stopped_waits_for_nothing_any_more() -> None:
    pace = Pace(None)
    pace.hold(held=True)
    assert pace.waits
    pace.stop()
    pace.hold(held=True)
    await pace.turn()
    assert not pace.waits


def test_a_range_that_begins_behind_its_end_is_refused(tmp_path: Path) -> None:
    backwards = replace(PLAN, ranges=(replace(RANGE, first=40, end=30),))
    with pytest.raises(Refused, match="begins at 40, behind its end 30; Kafka has the offsets 5-90"):
        ranges.check(settings(tmp_path), backwards, facts())


@pytest.mark.parametrize("silent_below", [50, 60])
def test_calls_that_a_restored_database_has_lost_are_announced(silent_below: int, tmp_path: Path) -> None:
    acting = settings(tmp_path, ACTING)
    plan = ranges.check(acting, replace(PLAN, ranges=(replace(RANGE, end=60, silent_below=silent_below),)), facts())
    assert any("are made again" in warning for warning in plan.warnings) is (silent_below > 50)


def test_outputs_are_compared_by_id_and_a_repeat_of_a_replay_counts_as_the_same() -> None:
    compared = Comparer()
    compared.processed(b"\x01", "same")
    compared.processed(b"\x02", "changed")
    compared.processed(b"\x03", "gone")
    compared.processed(b"\x04", "new")
    for number, value in ((1, b"a"), (2, b"b"), (4, b"d")):
        compared.made(Outgoing(0, "out", b"k", value, f"m{number}", 0, f"0{number}-0"))
    for number, value in ((1, b"a"), (2, b"x"), (3, b"c"), (9, b"of another consumer")):
        compared.sent(Scanned("out", b"k", value, (("message-id", b"0%d-0" % number), ("replay", b"again"))))
    found = compared.result()
    assert (found.same, found.different) == (1, {"changed": 1, "gone": 1, "new": 1})


@pytest.mark.parametrize(
    ("offset", "text", "first_epoch", "refused"),
    [
        (70, metadata(3), 0, True),
        (50, metadata(3), 0, False),
        (70, "moved by hand", 0, False),
        (70, metadata(3), 4, False),  # of an earlier topic
        (20, metadata(3), 0, False),  # it has moved on since
    ],
)
def test_a_reset_does_not_hide_that_the_database_has_lost_commits(
    offset: int, text: str, first_epoch: int, *, refused: bool
) -> None:
    found = facts(committed=CommittedOffset(offset, text), first_epoch=first_epoch)
    with pytest.raises(Halt, match="lost commits") if refused else nullcontext():
        reset.moves(found, {ORDERS: 30}, despite_forgotten=False)


def test_a_reset_notes_what_was_published_and_names_what_it_would_change() -> None:
    found = facts(committed=CommittedOffset(48, metadata(3)))
    (move,) = reset.moves(found, {ORDERS: 20}, despite_forgotten=False)
    assert (move.before, move.after, move.after_metadata) == (48, 20, metadata(3, sent=48))
    assert reset.moves(found, {ORDERS: 48}, despite_forgotten=False) == []
    moved_before = facts(committed=CommittedOffset(20, metadata(3, sent=48)))
    (again,) = reset.moves(moved_before, {ORDERS: 30}, despite_forgotten=False)
    assert again.after_metadata == metadata(3, sent=48)
