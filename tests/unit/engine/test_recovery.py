"""The crash table, row by row: what L and K say about the past, and what is done about it."""

from __future__ import annotations

import pytest

from processor.engine.recovery import Step, decide
from processor.errors import Halt
from processor.messages.message import Partition
from processor.messages.positions import CommittedOffset, Log, metadata
from processor.postgres.ledger import LedgerRow
from processor.postgres.retention import NOTHING_FORGOTTEN, Watermark

PARTITION = Partition("orders", 3)
LOG = Log("topic-1", 0, 1000)


def ledger(first: int, next_: int, outputs: bytes | None = b"stored") -> LedgerRow:
    return LedgerRow(7, "topic-1", first, next_, 3, [] if outputs is None else [outputs])


def ours(offset: int, epoch: int = 7) -> CommittedOffset:
    return CommittedOffset(offset, metadata(epoch))


def foreign(offset: int) -> CommittedOffset:
    return CommittedOffset(offset, "")


def step(
    row: LedgerRow | None,
    committed: CommittedOffset | None,
    log: Log = LOG,
    start: str = "earliest",
    on_database_behind: str = "halt",
    met: int | None = None,
    forgotten: Watermark = NOTHING_FORGOTTEN,
) -> Step:
    return decide(
        PARTITION,
        row,
        committed,
        log,
        start=start,
        on_database_behind=on_database_behind,
        met=met,
        forgotten=forgotten,
    )


def test_metadata_names_the_epoch_and_anything_else_is_foreign() -> None:
    assert CommittedOffset(5, metadata(12)).epoch == 12
    for text in ("", "processor", "processor epoch=", "my processor epoch=1", "processor epoch=1 "):
        assert not CommittedOffset(5, text).ours


def test_metadata_of_an_offset_that_is_yet_to_be_followed_says_what_was_sent_and_is_not_ours() -> None:
    moved = CommittedOffset(5, metadata(12, sent=40))
    assert (moved.epoch, moved.sent, moved.ours) == (12, 40, False)
    assert CommittedOffset(5, metadata(12)).sent is None


@pytest.mark.parametrize(("start", "offset"), [("earliest", 40), ("latest", 1000)])
def test_first_start_begins_where_the_setting_says_and_anchors_the_position_in_both_systems(
    start: str, offset: int
) -> None:
    found = step(None, None, Log("topic-1", 40, 1000), start=start)
    assert found == Step("first_start", offset, commit=offset, create=True)


def test_first_start_is_refused_when_the_setting_is_fail() -> None:
    with pytest.raises(Halt, match=r"orders\[3\].*kafka.start"):
        step(None, None, start="fail")


@pytest.mark.parametrize("start", ["earliest", "latest", "fail"])
def test_partition_that_was_added_begins_at_its_beginning_whatever_the_setting_says(start: str) -> None:
    found = step(None, None, Log("topic-1", 40, 1000), start=start, met=3)
    assert found == Step("partition_added", 40, commit=40, create=True)


def test_partition_that_was_there_from_the_first_is_not_added_because_another_one_began_a_moment_earlier() -> None:
    assert step(None, None, start="latest", met=4) == Step("first_start", 1000, commit=1000, create=True)
    with pytest.raises(Halt, match=r"kafka\.start"):
        step(None, None, start="fail", met=4)


def test_offsets_of_another_framework_are_adopted() -> None:
    assert step(None, foreign(500)) == Step("offsets_adopted", 500, create=True, follow=True)


def test_forgotten_group_offsets_are_restored_from_the_ledger_with_outputs_that_may_be_unsent() -> None:
    assert step(ledger(400, 500), None) == Step("offsets_forgotten", 500, send_from=400, commit=500)
    assert step(ledger(400, 500, None), None) == Step("offsets_forgotten", 500, commit=500)


def test_in_step_goes_on_and_treats_stored_outputs_as_history() -> None:
    assert step(ledger(400, 500), ours(500)) == Step("in_step", 500)


def test_death_between_the_commits_sends_the_stored_outputs_and_moves_the_offset_without_reading_again() -> None:
    assert step(ledger(400, 500), ours(400)) == Step("died_between_commits", 500, send_from=400, commit=500)


def test_of_several_batches_those_are_sent_that_kafka_does_not_have() -> None:
    assert step(ledger(100, 500), ours(400)) == Step("died_between_commits", 500, send_from=400, commit=500)
    assert step(ledger(100, 500, None), ours(400)) == Step("died_between_commits", 500, commit=500)


def test_death_between_the_commits_of_a_batch_without_outputs_only_moves_the_offset() -> None:
    assert step(ledger(400, 500, None), ours(400)) == Step("died_between_commits", 500, commit=500)


def test_rewind_reads_again_and_sends_nothing_that_is_known_to_be_sent() -> None:
    assert step(ledger(400, 500, None), foreign(100)) == Step("rewound", 100, follow=True)


@pytest.mark.parametrize("offset", [100, 400, 450, 500, 700])
def test_moved_offset_after_a_crash_sends_unmarked_outputs_first_and_stays_foreign_meanwhile(offset: int) -> None:
    found = step(ledger(400, 500), foreign(offset))
    assert (found.start, found.send_from, found.commit, found.follow) == (offset, 400, None, True)


@pytest.mark.parametrize(("sent", "send_from"), [(450, 450), (300, 400), (500, 500)])
def test_moved_offset_whose_outputs_were_sent_before_a_crash_sends_only_the_others(sent: int, send_from: int) -> None:
    found = step(ledger(400, 500), CommittedOffset(100, metadata(7, sent)))
    assert found == Step("rewound", 100, send_from=send_from, follow=True)


def test_moved_offset_that_the_ledger_has_followed_before_a_crash_is_made_ours() -> None:
    assert step(ledger(100, 100, None), CommittedOffset(100, metadata(7, 450))) == Step("in_step", 100, follow=True)


def test_skip_ahead_by_an_operator_is_followed() -> None:
    assert step(ledger(400, 500, None), foreign(800)).event == "skipped_ahead"
    assert step(ledger(400, 500, None), foreign(800)).start == 800


def test_kafka_having_lost_commits_of_ours_reads_again_from_there() -> None:
    found = step(ledger(400, 500), ours(300))
    assert (found.event, found.start, found.follow) == ("rewound", 300, True)


def test_database_that_lost_commits_halts() -> None:
    with pytest.raises(Halt, match=r"Kafka has committed offset 900, the database only 500.*on_database_behind"):
        step(ledger(400, 500), ours(900))
    with pytest.raises(Halt, match="the database only 0"):
        step(None, ours(900))


def test_database_that_lost_commits_is_reapplied_in_silence_when_told_so() -> None:
    assert step(ledger(400, 500), ours(900), on_database_behind="reapply") == Step("reapplying", 500, silent_below=900)
    found = step(None, ours(900), Log("topic-1", 40, 1000), on_database_behind="reapply")
    assert found == Step("reapplying", 40, silent_below=900, create=True)


def test_recreated_topic_halts_whatever_the_offsets_say() -> None:
    with pytest.raises(Halt, match="created anew"):
        step(ledger(400, 500), ours(500), Log("topic-2", 0, 1000))


def test_offset_that_was_committed_for_a_topic_that_had_the_name_before_says_nothing() -> None:
    row = LedgerRow(9, "topic-1", 0, 40, 4, [b"stored"], first_epoch=8)
    anew = Step("offsets_forgotten", 40, send_from=0, commit=40)
    assert step(row, ours(900, 7)) == step(row, ours(30, 7)) == step(row, None) == anew
    assert step(row, ours(40, 8)).event == "in_step"


@pytest.mark.parametrize("committed", [ours(500), foreign(500), foreign(450)])
@pytest.mark.parametrize("log", [Log("topic-1", 600, 1000), Log("topic-1", 0, 100)])
def test_position_outside_the_log_halts_and_is_never_reset(committed: CommittedOffset, log: Log) -> None:
    with pytest.raises(Halt, match=r"expired|truncated"):
        step(ledger(400, 500), committed, log)


def test_accepting_the_gap_with_kafkas_own_tool_goes_on_from_there() -> None:
    found = step(ledger(400, 500, None), foreign(600), Log("topic-1", 600, 1000))
    assert (found.event, found.start) == ("skipped_ahead", 600)


@pytest.mark.parametrize("committed", [foreign(99), ours(99), CommittedOffset(99, metadata(7, sent=450))])
def test_rewind_below_the_watermark_halts_with_the_range_that_is_forgotten_and_the_one_that_is_safe(
    committed: CommittedOffset,
) -> None:
    with pytest.raises(
        Halt,
        match=r"back to 99, and messages below 300 are forgotten .* from 99 to 299 .* to 300 or above .*accept-rewind",
    ):
        step(ledger(400, 500), committed, forgotten=Watermark(300))


def test_only_what_was_done_would_be_handled_again() -> None:
    """After a rewind that was accepted, the ledger itself may stand below the watermark."""
    with pytest.raises(Halt, match="from 100 to 149 "):
        step(ledger(150, 150, None), foreign(100), forgotten=Watermark(300))


@pytest.mark.parametrize(
    ("committed", "event"),
    [
        (foreign(300), "rewound"),
        (foreign(350), "rewound"),
        (ours(350), "rewound"),
        (ours(400), "died_between_commits"),
        (ours(500), "in_step"),
        (foreign(500), "in_step"),
        (foreign(700), "skipped_ahead"),
        (None, "offsets_forgotten"),
    ],
)
def test_at_or_above_the_watermark_nothing_changes(committed: CommittedOffset | None, event: str) -> None:
    assert step(ledger(400, 500), committed, forgotten=Watermark(300)).event == event
    assert step(ledger(400, 500), committed, forgotten=Watermark(300)) == step(ledger(400, 500), committed)


def test_position_below_the_watermark_that_was_not_moved_goes_on() -> None:
    """A crash in the middle of a rewind that was accepted."""
    row = ledger(100, 150)
    for committed in (ours(150), ours(120), foreign(150), foreign(200)):
        assert step(row, committed, forgotten=Watermark(300)) == step(row, committed)


@pytest.mark.parametrize(("offset", "accepted"), [(99, 99), (120, 99), (299, 0)])
def test_accepted_rewind_is_followed(offset: int, accepted: int) -> None:
    found = step(ledger(400, 500, None), foreign(offset), forgotten=Watermark(300, accepted))
    assert found == Step("rewound", offset, follow=True)


def test_acceptance_of_one_offset_is_none_of_a_lower_one() -> None:
    with pytest.raises(Halt, match="forgotten"):
        step(ledger(400, 500, None), foreign(98), forgotten=Watermark(300, 99))


def test_database_that_was_restored_remembers_what_it_did_then() -> None:
    found = step(ledger(400, 500), ours(900), on_database_behind="reapply", forgotten=Watermark(300))
    assert found == Step("reapplying", 500, silent_below=900)
