from __future__ import annotations

from pathlib import Path

import pytest

from processor.errors import ConfigError
from processor.settings.importing import resolve

MODULES = {
    "fine": "async def reserve(message, db): ...\nlimit = 3\n",
    "needs": "import a_module_that_does_not_exist\n",
    "broken": "def reserve(:\n",
    "failing": "import os\n\nraise RuntimeError('no\\nSTOCK_URL')\n",
    "leaving": "raise SystemExit(3)\n",
}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "shop_for_import_tests"
    package.mkdir()
    for name, source in MODULES.items():
        (package / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])


def test_the_working_directory_is_searched() -> None:
    assert resolve("shop_for_import_tests.fine:reserve").__name__ == "reserve"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("fine:reserv", "did you mean shop_for_import_tests.fine:reserve?"),
        ("fine:limit", "is a int, not a function"),
        ("nowhere:reserve", "no module 'shop_for_import_tests.nowhere' in "),
        (
            "needs:reserve",
            "ModuleNotFoundError: No module named 'a_module_that_does_not_exist' (shop_for_import_tests/needs.py",
        ),
        ("broken:reserve", "SyntaxError: "),
        ("failing:reserve", "RuntimeError: no STOCK_URL (shop_for_import_tests/failing.py, line 3)"),
        ("leaving:reserve", "SystemExit: 3"),
    ],
)
def test_what_goes_wrong_is_one_line(call: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(f"shop_for_import_tests.{call}")
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"shop_for_import_tests.{call}: ")
    assert says in line
