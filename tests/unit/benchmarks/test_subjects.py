"""Who is measured, and with which configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import distance
from benchmarks.distance import Form
from benchmarks.job import Job
from benchmarks.subjects import SUBJECTS, Processor
from processor.settings.load import load


@pytest.mark.parametrize("subject", [subject for subject in SUBJECTS if isinstance(subject, Processor)])
def test_the_processor_accepts_the_configuration_that_is_written_for_it(subject: Processor, tmp_path: Path) -> None:
    path = tmp_path / "bench.toml"
    path.write_text(subject.config(Job("localhost:9092", "postgresql://localhost/bench", "orders", "out", "bench")))
    settings = load(path, environ={})
    assert settings.consumer == "bench"
    assert settings.batch.max_messages == 2000


@pytest.mark.parametrize("form", [subject for subject in distance.SUBJECTS if isinstance(subject, Form)])
def test_forms_that_are_measured_far_away_have_the_batches_of_their_profile(form: Form, tmp_path: Path) -> None:
    path = tmp_path / "bench.toml"
    path.write_text(form.config(Job("localhost:9092", "postgresql://localhost/bench", "orders", "out", "bench")))
    settings = load(path, environ={})
    assert settings.batch.max_messages == (4000 if form.name == "batch" else 1000)
    assert settings.concurrency == (16 if form.name.endswith("16") else 1)
