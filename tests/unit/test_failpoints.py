"""Failpoints kill exactly where and when they are told to, and are free when they are not armed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import processor
from processor import failpoints
from processor.errors import ConfigError

SCRIPT = """
import sys
from processor import failpoints
failpoints.arm(sys.argv[1])
for passes in range(1, 5):
    failpoints.reach("after_claim")
    failpoints.reach("before_ledger")
    print(passes, flush=True)
"""


@pytest.mark.parametrize(
    ("specification", "printed", "code"),
    [
        ("", "1 2 3 4", 0),
        ("after_claim=kill", "", -signal.SIGKILL),
        ("before_ledger=kill@3", "1 2", -signal.SIGKILL),
        ("after_claim=kill@9, before_ledger=kill@2", "1", -signal.SIGKILL),
    ],
)
def test_process_dies_at_the_pass_that_was_named(specification: str, printed: str, code: int) -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT, specification], capture_output=True, text=True, check=False)
    assert (ended.stdout.split(), ended.returncode) == (printed.split(), code), ended.stderr


@pytest.mark.parametrize("specification", ["nowhere=kill", "after_claim", "after_claim=explode", "after_claim=kill@x"])
def test_bad_specification_is_refused_with_what_there_is(specification: str) -> None:
    with pytest.raises(ConfigError, match=r"PROCESSOR_FAILPOINTS.*after_postgres_commit"):
        failpoints.arm(specification)


def test_every_point_is_reached_somewhere_in_the_engine() -> None:
    package = Path(processor.__file__).parent
    reached = {
        name for path in package.rglob("*.py") for name in re.findall(r'failpoints\.reach\("(\w+)"\)', path.read_text())
    }
    assert reached == set(failpoints.POINTS)
