from __future__ import annotations

from uuid import UUID

from processor.operations import redrive
from processor.postgres.dead_letters import Brief


def rows(*sizes: int) -> list[Brief]:
    return [Brief(UUID(int=n), n, "failed", f"m{n}", None, None, None, size) for n, size in enumerate(sizes)]


def test_chunks_are_bounded_by_rows_and_bytes_and_keep_the_order() -> None:
    half = redrive.CHUNK_BYTES // 2
    chunks = [
        [row.offset for row in chunk] for chunk in redrive.chunks(rows(1, 1, 1, half, half, half, 3 * half, 1), 2)
    ]
    assert chunks == [[0, 1], [2, 3], [4, 5], [6], [7]]
    assert list(redrive.chunks([], 2)) == []
