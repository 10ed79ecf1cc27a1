"""The pages say what the code does: examples run, references resolve, tables are complete."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from processor import errors, failpoints
from processor.cli.main import EPILOG
from processor.cli.verify import FOUND
from processor.engine import recovery
from processor.engine.failing import outcomes
from processor.engine.loop import Loop
from processor.engine.takeover import Takeover
from processor.messages import letters
from processor.messages.message import Message, Output
from processor.operations import check
from processor.settings import reference
from processor.settings.database import TlsSettings
from processor.settings.load import load
from processor.settings.schema import FailureSettings, HandlerSettings, Settings
from processor.stack import kafka
from processor.stack.state import Shape, State
from tests.support import runbooks
from tests.unit.test_architecture import BASE, RULES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DESIGN = (ROOT / "DESIGN.md").read_text()
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
FAILURES = (ROOT / "docs/failures.md").read_text()
OPERATIONS = (ROOT / "docs/operations.md").read_text()
ORDERS = (ROOT / "config/orders.toml").read_text()
COMPOSE = (ROOT / "docker-compose.yml").read_text()


def block(after: str) -> str:
    """The first code block of the README behind this text."""
    found = re.search(r"```\w*\n(.*?)```", README[README.index(after) :], re.DOTALL)
    assert found is not None
    return found[1]


class Table:
    """Stands for the database in the README's handler."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []

    async def fetchval(self, _sql: str, *row: Any) -> int:
        self.rows.append(row)
        return len(self.rows)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shop.py").write_text(block("`shop.py`"))
    (tmp_path / "shop.toml").write_text(block("`shop.toml`"))
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "0001_invoices.sql").write_text(block("`tables/0001_invoices.sql`"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    return tmp_path


async def test_the_readme_s_handler_runs_under_its_configuration(project: Path) -> None:
    settings = load(project / "shop.toml", environ={})
    findings = check.offline(settings)
    assert [finding.text for finding in findings if finding.ok is not True] == []
    shop = importlib.import_module("shop")
    table = Table()
    value = shop.OrderPlaced(order_id="o-1", total=10)
    answer = await shop.invoice(Message("o-1", "OrderPlaced", None, value, (), "orders", 0, 0, None), table)
    assert isinstance(answer, Output)
    assert answer.value == {"order_id": "o-1", "number": 1}
    assert table.rows == [("o-1", 10)]


def test_the_readme_s_handler_fits_in_twenty_lines() -> None:
    assert len(block("`shop.py`").splitlines()) < 20


PAGES = [
    "README.md",
    "DESIGN.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/configuration.md",
    "docs/handlers.md",
    "docs/failures.md",
    "docs/operations.md",
    "docs/retention.md",
    "docs/distance.md",
    "docs/performance.md",
    "docs/replay.md",
    "docs/verify.md",
]


def test_readme_and_help_name_the_same_exit_codes_and_all_of_them() -> None:
    table = README[README.index("| exit code | meaning") : README.index("`--workers N` restarts")]
    listed = re.findall(r"^\| (\d+(?: \+ n)?) \|", table, re.MULTILINE)
    status = EPILOG.partition("Exit status: ")[2].split(", ")
    assert [code[0] for one in status if (code := re.match(r"\d+(?: \+ n)?", one))] == listed
    kinds: list[type[errors.ProcessorError]] = [errors.ProcessorError, *errors.ProcessorError.__subclasses__()]
    raised = {str(kind.exit_code) for kind in kinds}
    assert {*raised, "0", str(FOUND), "130", "128 + n"} == set(listed)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_make_targets_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, link
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for pair in re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", text, re.MULTILINE):
        assert (pair[0] or pair[1]) in targets, pair


def test_the_page_of_settings_is_what_make_docs_makes_of_them() -> None:
    assert reference.page(CONFIGURATION) == CONFIGURATION, "run `make docs`"


def test_every_setting_has_its_row_and_its_meaning() -> None:
    rows = re.findall(r"^\| `([a-zA-Z_.]+)` \| .+ \| (.+) \|$", reference.tables(), re.MULTILINE)
    handlers = {f"handlers.TYPE.{name}" for name in HandlerSettings.model_fields}
    tls = {f"database.tls.{name}" for name in TlsSettings.model_fields}
    assert {key for key, _ in rows} == set(_keys(Settings)) - {"source", "handlers", "database.tls"} | handlers | tls
    assert all(meaning != "None" for _, meaning in rows)


def test_the_meaning_of_a_choice_names_all_that_can_be_chosen() -> None:
    fields = [(name, field) for model in _models(Settings) for name, field in model.model_fields.items()]
    chosen = [(name, field) for name, field in fields if "Literal[" in str(field.annotation)]
    assert len(chosen) > 5
    for name, field in chosen:
        for choice in re.findall(r"'([a-z-]+)'", str(field.annotation)):
            assert f"`{choice}`" in str(field.description), f"{name}: {choice}"


def test_orders_toml_names_every_setting_and_the_default_of_those_left_out() -> None:
    named, defaults = {"topics", "source"}, {}
    table, is_example = "", False
    for line in ORDERS.splitlines():
        if header := re.match(r"(# )?\[([a-z.]+)\]", line):
            table, is_example = f"{header[2]}.", bool(header[1])
            named.add(header[2])
        elif setting := re.match(r"(# )?([a-z_]+) *= *(.+)", line):
            named.add(table + setting[2].removesuffix("_file" if setting[2] == "password_file" else ""))
            if setting[1] and not is_example and "for example" not in line:
                defaults[table + setting[2]] = tomllib.loads(f"value = {setting[3]}")["value"]
    assert named >= set(_keys(Settings))
    assert defaults == {key: _default(key) for key in defaults}
    assert len(defaults) > 20


def _default(key: str) -> Any:
    *tables, name = key.split(".")
    model: type[BaseModel] = Settings
    for table in tables:
        nested = model.model_fields[table].annotation
        assert isinstance(nested, type)
        model = nested
    return model.model_fields[name].default


def _models(model: type[BaseModel]) -> list[type[BaseModel]]:
    nested = [field.annotation for field in model.model_fields.values()]
    below = [found for one in nested if isinstance(one, type) and issubclass(one, BaseModel) for found in _models(one)]
    return [model, *below]


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Paths of all settings; tables whose keys are the user's, or libpq's, count as one."""
    keys = []
    for name, field in model.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel) and name != "tls":
            keys += _keys(nested, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def test_the_file_map_names_every_module_and_no_other() -> None:
    table = DESIGN[DESIGN.index("## File map") : DESIGN.index("## Non-obvious")]
    named = set(re.findall(r"^\| `([\w/]+\.py)` \|", table, re.MULTILINE))
    folder = ROOT / "processor"
    modules = {path for path in folder.rglob("*.py") if path.name != "__init__.py" or path.read_text()}
    assert named == {str(path.relative_to(folder)) for path in modules}


def test_functions_that_the_design_names_exist() -> None:
    references = set(re.findall(r"`([\w/]+\.py):(\w+)`", DESIGN))
    assert len(references) > 20
    for file, function in sorted(references):
        tree = ast.parse((ROOT / "processor" / file).read_text())
        defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert function in defined, f"{file}:{function}"


def test_the_design_names_the_failpoints_and_findings_of_recovery() -> None:
    windows = DESIGN[DESIGN.index("## Where it may die") : DESIGN.index("## Taking and losing")]
    assert set(re.findall(r"`((?:before|after)_\w+)`", windows)) == set(failpoints.POINTS)
    source = Path(recovery.__file__).read_text()
    events = set(re.findall(r'Step\(\s*"(\w+)"|event="(\w+)"|"(rewound|skipped_ahead)"', source))
    for event in {name for found in events for name in found if name}:
        assert f"`{event}`" in DESIGN, event


def first_functions(heading: str, following: str) -> dict[str, str]:
    """The function that each numbered item of a section of DESIGN.md names first, by its number."""
    section = DESIGN[DESIGN.index(f"## {heading}\n") : DESIGN.index(f"## {following}\n")]
    return dict(re.findall(r"^(\d+)\. \*\*[^`]*`[\w/]+\.py:(\w+)`", section, re.MULTILINE))


def numbered_calls(function: Any) -> dict[str, str]:
    """The function that is called in each line with a number behind it, by this number."""
    calls = re.findall(r"(\w+)\([^#\n]*# (\d+)", inspect.getsource(function))
    return {number: name for name, number in calls}


def test_the_design_walks_the_numbered_steps_of_the_code() -> None:
    walk = first_functions("The walk", "Columns and rows")
    assert list(walk) == [str(number) for number in range(1, 12)]
    commit = numbered_calls(Loop._commit)
    assert list(commit) == [str(number) for number in range(3, 10)]
    assert {number: walk[number] for number in commit} == commit
    recover = numbered_calls(Takeover.recover)
    assert len(recover) == 5
    assert first_functions("Taking and losing partitions", "Failing inside a batch") == recover


def test_the_design_names_every_outcome_of_an_attempt() -> None:
    table = DESIGN[DESIGN.index("| outcome | when |") : DESIGN.index("`Remaining`")]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert set(named) == {one.__name__ for one in get_args(outcomes.Outcome)}


def test_the_design_says_who_may_import_whom() -> None:
    rooms = DESIGN[DESIGN.index("| room | what it holds |") : DESIGN.index("What becomes of a batch in Kafka")]
    found = {
        room: set(filter(None, allowed.split(", ")))
        for room, allowed in re.findall(r"^\| `([\w.]+)` \| .+ \| (.*?) ?\|$", rooms, re.MULTILINE)
    }
    folders = {
        room: allowed for room, allowed in RULES.items() if (ROOT / "processor" / room.replace(".", "/")).is_dir()
    }
    assert found == {room: allowed - BASE for room, allowed in folders.items()}


def test_lines_of_the_design_are_wrapped() -> None:
    long = [line for line in DESIGN.splitlines() if len(line) > 120 and not line.startswith("|")]
    assert long == []


def test_the_page_about_failures_names_every_setting_class_and_header() -> None:
    for key in _keys(Settings):
        if key.startswith(("retry.", "failure.", "effects.")):
            assert f"`{key}" in FAILURES or f"[{key}]" in FAILURES, key
    for field in ("policy", "classes"):
        choices = re.findall(r"'([a-z-]+)'", str(FailureSettings.model_fields[field].annotation))
        assert len(choices) > 2
        assert all(f"`{choice}`" in FAILURES for choice in choices)
    headers = set(re.findall(r'"(dlq-[a-z-]+)"', Path(letters.__file__).read_text()))
    assert headers == set(re.findall(r"`(dlq-[a-z-]+)`", FAILURES))


def test_every_runbook_has_its_test_and_says_when_what_and_the_way_back() -> None:
    tree = ast.parse((ROOT / "tests/integration/test_runbooks.py").read_text())
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    sections = runbooks.sections()
    assert {runbooks.test_name(heading) for heading in sections} == tests
    assert len(sections) == len(tests) == 10
    for heading, section in sections.items():
        parts = re.findall(r"^\*\*(When|First|Do|You see|What can go wrong)\b", section, re.MULTILINE)
        assert parts == ["When", "First", "Do", "You see", "What can go wrong"], heading
        assert re.search(r"\*\*(The way back|There is no way back)\b", section), heading
        assert runbooks.blocks(section), heading
        assert f"(#{heading.lower().replace(' ', '-')})" in OPERATIONS, f"{heading}: not in the contents"


def test_no_python_is_refused_for_being_too_new() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert "sys.exit(sys.version_info < (3, 11))" in (ROOT / "Makefile").read_text()


def test_compose_starts_the_same_servers_as_the_local_stack() -> None:
    given = dict(re.findall(r'^      KAFKA_([A-Z_]+): "(.*)"$', COMPOSE, re.MULTILINE))
    state = State.new(Shape())
    state.server("broker-1").ports = {kafka.INTERNAL: 9092, kafka.CONTROLLER: 9093}
    ours = {name.upper().replace(".", "_"): value for name, value in kafka.settings(1, state, "data").items()}
    places = {"LISTENERS", "ADVERTISED_LISTENERS", "CONTROLLER_QUORUM_VOTERS", "LISTENER_SECURITY_PROTOCOL_MAP"}
    places |= {"INTER_BROKER_LISTENER_NAME", "LOG_DIRS"}
    shared = given.keys() & ours.keys() - places
    assert len(shared) > 15
    assert {name: given[name] for name in shared} == {name: ours[name] for name in shared}
    assert given.keys() - ours.keys() == {"HEAP_OPTS"}


def test_compose_publishes_on_loopback_only() -> None:
    ports = re.findall(r'^      - "(\S+:\d+)"$', COMPOSE, re.MULTILINE)
    assert sorted(ports) == ["127.0.0.1:5432:5432", "127.0.0.1:9092:9092"]
    assert "\t" not in COMPOSE
