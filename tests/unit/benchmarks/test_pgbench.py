"""Values as pgbench's scripts hold them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import pgbench


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "NULL"),
        (5, "5"),
        (True, "true"),
        ("it's", "'it''s'"),
    ],
)
def test_values_are_written_out_as_postgres_reads_them(value: Any, text: str) -> None:
    assert pgbench.literal(value) == text
