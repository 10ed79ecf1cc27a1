"""The names of librdkafka's properties."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from confluent_kafka import cimpl

from processor.settings import librdkafka


def test_property_names_are_those_of_the_installed_librdkafka(tmp_path: Path) -> None:
    shown = properties_of_librdkafka(tmp_path)
    assert shown.keys() >= librdkafka.NAMES
    for table, scope in ((librdkafka.CONSUMER, "C"), (librdkafka.PRODUCER, "P"), (librdkafka.BOTH, "*")):
        assert {shown[name] for name in table} == {scope}


def properties_of_librdkafka(tmp_path: Path) -> dict[str, str]:
    """Names and C/P/* scopes, from the table librdkafka prints for its own documentation."""
    file = tmp_path / "properties"
    library, libc = ctypes.CDLL(cimpl.__file__), ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.fopen(os.fsencode(file), b"w"))
    library.rd_kafka_conf_properties_show(stream)
    libc.fclose(stream)
    rows = [line.split("|") for line in file.read_text().splitlines() if line.count("|") >= 5]
    return {row[0].strip(): row[1].strip() for row in rows}
