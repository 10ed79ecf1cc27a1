from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from processor.cli.arguments import WrongUse
from processor.cli.dlq.filters import Filters, moment
from processor.postgres.dead_letters import Filter

NOW = datetime(2025, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2h", NOW - timedelta(hours=2)),
        ("1d12h", NOW - timedelta(days=1, hours=12)),
        ("90s", NOW - timedelta(seconds=90)),
        ("2025-02-28", datetime(2025, 2, 28, tzinfo=UTC)),
        ("2025-02-28T10:00", datetime(2025, 2, 28, 10, tzinfo=UTC)),
        ("2025-02-28T10:00Z", datetime(2025, 2, 28, 10, tzinfo=UTC)),
        ("2025-02-28T10:00+02:00", datetime(2025, 2, 28, 8, tzinfo=UTC)),
    ],
)
def test_times_are_moments_or_how_long_ago(text: str, expected: datetime) -> None:
    assert moment(text, NOW) == expected


@pytest.mark.parametrize("text", ["", "h", "2", "2x", "yesterday", "12h2d", "9999999999999d"])
def test_what_is_no_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(WrongUse, match="2h"):
        moment(text, NOW)


def test_no_option_means_all_that_failed_or_is_parked() -> None:
    assert Filters().wanted() == Filter()


def test_bytes_of_an_argument_that_are_not_utf_8_are_kept_in_keys_and_replaced_in_ids() -> None:
    wanted = Filters(ids=["m\udcff"], key="k\udcff").wanted()
    assert (wanted.ids, wanted.key) == (("m?",), b"k\xff")
