"""The settings of the deployment that a command is about."""

from __future__ import annotations

from pathlib import Path

from processor.kafka import properties
from processor.settings import load as settings
from processor.settings.schema import Settings


def load(config_file: Path) -> Settings:
    """Those of this file and the environment; librdkafka has judged its own properties among them."""
    return settings.load(config_file, judge=properties.refusal)
