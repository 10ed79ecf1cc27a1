"""`processor replay cancel`."""

from __future__ import annotations

from processor.cli.arguments import ConfigFile, grouped
from processor.cli.output import Output
from processor.cli.replay.options import Name, Reason
from processor.cli.replay.order import give
from processor.operations.replay import control


@grouped
def cancel(config_file: ConfigFile, name: Name, *, reason: Reason = None, output: Output) -> None:
    """End a replay for good: the process that works on it stops, and what it has done stays done.

    \b
    processor replay cancel shop.toml rebuild
    processor replay cancel shop.toml rebuild --reason "peak hours"
    """
    give(control.cancel, config_file, name, reason, output)
