"""`processor replay pause`."""

from __future__ import annotations

from processor.cli.arguments import ConfigFile, grouped
from processor.cli.output import Output
from processor.cli.replay.options import Name, Reason
from processor.cli.replay.order import give
from processor.operations.replay import control


@grouped
def pause(config_file: ConfigFile, name: Name, *, reason: Reason = None, output: Output) -> None:
    """Let the process that works on a replay stop after its current batch; `resume` goes on.

    \b
    processor replay pause shop.toml rebuild
    processor replay pause shop.toml rebuild --reason "peak hours"
    """
    give(control.pause, config_file, name, reason, output)
