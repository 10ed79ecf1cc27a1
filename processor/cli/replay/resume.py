"""`processor replay resume`."""

from __future__ import annotations

from processor.cli.arguments import ConfigFile, grouped
from processor.cli.deployment import load
from processor.cli.output import Output
from processor.cli.replay.foreground import work
from processor.cli.replay.options import Name, Rate


@grouped
def resume(config_file: ConfigFile, name: Name, *, rate: Rate = None, output: Output) -> None:
    """Go on with a replay that was paused, interrupted or killed, from where it was.

    A --rate takes the place of the one it was made with, this time.

    \b
    processor replay resume shop.toml missing-20250301-120000
    processor replay resume shop.toml rebuild -o json
    """
    work(load(config_file), name, output.format, rate)
