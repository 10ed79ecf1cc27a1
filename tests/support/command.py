"""The command `processor` as a user runs it: a process of its own, without the settings of whoever runs the tests."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path


async def processor_beside(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same while the test's own event loop goes on."""
    return await asyncio.to_thread(processor, directory, *arguments)


def processor(
    directory: Path, *arguments: str, environ: dict[str, str] | None = None, stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PROCESSOR_")}
    return subprocess.run(
        [sys.executable, "-m", "processor", *arguments],
        cwd=directory,
        env=inherited | (environ or {}),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
