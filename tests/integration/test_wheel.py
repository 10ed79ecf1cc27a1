"""The wheel, installed the way a user would, away from the sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = """
consumer = "inventory"
topic = "orders"
handlers.OrderPlaced = "shop:reserve"
kafka.bootstrap_servers = "127.0.0.1:1"
database.url = "postgresql://127.0.0.1:1/stock"
"""
HANDLER = """
from typing import Any

from processor import Message


async def reserve(message: Message[dict[str, Any]], db: object) -> None: ...
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the wheel's content."""
    wheels = tmp_path_factory.mktemp("wheels")
    target = tmp_path_factory.mktemp("installed")
    build = ("-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(ROOT))
    python(*build, cwd=wheels)
    (wheel,) = wheels.glob("*.whl")
    install = ("-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--target", str(target))
    python(*install, str(wheel), cwd=wheels)
    return target


def python(*arguments: str, cwd: Path, path: Path | None = None) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PROCESSOR_")}
    environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    if path is not None:
        environ["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_command_runs_outside_the_sources(installed: Path, tmp_path: Path) -> None:
    script = installed / "bin" / "processor"
    assert "migrate" in python(str(script), "--help", cwd=tmp_path, path=installed)
    assert python(str(script), "--version", cwd=tmp_path, path=installed).startswith("processor ")


def test_the_migrations_come_along(installed: Path, tmp_path: Path) -> None:
    code = "import processor, processor.postgres.migrate as m; print(processor.__file__); print(m.core_migrations())"
    package, migrations = python("-c", code, cwd=tmp_path, path=installed).splitlines()
    assert Path(package).is_relative_to(installed)
    assert Path(migrations) == installed / "processor" / "migrations"
    shipped = {file.name: file.read_bytes() for file in Path(migrations).glob("*.sql")}
    assert shipped == {file.name: file.read_bytes() for file in (ROOT / "migrations").glob("*.sql")}


def test_check_works_with_a_users_own_project(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "orders.toml").write_text(CONFIG)
    (tmp_path / "shop.py").write_text(HANDLER)
    out = python("-m", "processor", "check", "orders.toml", cwd=tmp_path, path=installed)
    assert "✓ handlers.OrderPlaced: shop:reserve" in out
    assert "✓ migrations processor: up to " in out
