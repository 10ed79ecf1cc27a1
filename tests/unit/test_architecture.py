"""Who may import whom, counting imports for type checkers too: a cycle there is a cycle in the reader's head."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import processor

PACKAGE = Path(processor.__file__).parent
BASE = {"errors", "failpoints", "threads"}
PURE = BASE | {"messages", "settings"}
SERVERS = PURE | {"kafka", "postgres", "observe"}

# Room: the other rooms that it may import.
RULES: dict[str, set[str]] = {
    "errors": set(),
    "failpoints": {"errors"},
    "threads": set(),
    "messages": BASE | {"settings"},
    "settings": BASE,
    "kafka": PURE,
    "postgres": PURE,
    "observe": BASE | {"messages"},
    "handling": SERVERS,
    "retention": SERVERS,
    "engine": SERVERS | {"handling", "retention"},
    "operations": SERVERS | {"handling", "retention"},
    "operations.replay": SERVERS | {"handling", "engine", "operations"},
    "service": SERVERS | {"handling", "engine"},
    "stack": BASE,
    "cli": SERVERS | {"handling", "retention", "operations", "operations.replay", "service", "stack"},
    "__main__": {"cli"},
    "__init__": {"errors", "handling", "messages"},
}

# Client library: the room that alone may use it.
CLIENTS = {"confluent_kafka": "kafka", "asyncpg": "postgres"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), ast.parse(path.read_text())


def imported(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room_of(module: str) -> str:
    """The room of a module; a room inside another one that has a rule of its own is a room too."""
    first, *rest = module.split(".")
    inner = ".".join([first, *rest[:1]])
    return inner if inner in RULES else first


def forbidden(module: str, tree: ast.Module) -> list[str]:
    own = room_of(module)
    found = []
    for name in sorted(imported(tree)):
        top, _, rest = name.partition(".")
        if top == "processor" and rest:
            room = room_of(rest)
            if (PACKAGE / room.replace(".", "/")).is_dir() or (PACKAGE / f"{room}.py").exists():
                if room != own and room not in RULES[own]:
                    found.append(f"{module} -> {rest}")
            else:
                found.append(f"{module} -> {rest}: only handlers import the package itself")
        elif CLIENTS.get(top, own) != own:
            found.append(f"{module} -> {top}: {CLIENTS[top]}/ alone uses it")
    return found


def test_every_room_has_its_rule() -> None:
    assert {room_of(module) for module, _ in modules()} == RULES.keys()


def test_imports_go_one_way() -> None:
    assert [found for module, tree in modules() for found in forbidden(module, tree)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("messages.outputs", "from processor.kafka.reader import PartitionReader"),
        ("settings.schema", "from processor.messages.message import Partition"),
        ("kafka.reader", "from processor.postgres import ledger"),
        ("observe.stalls", "if TYPE_CHECKING:\n    from processor.handling.registry import Route"),
        ("engine.loop", "import asyncpg"),
        ("engine.loop", "def later():\n    from confluent_kafka import Consumer"),
        ("handling.run", "from processor import Database"),
    ],
)
def test_forbidden_import_is_found_wherever_it_stands(module: str, source: str) -> None:
    assert forbidden(module, ast.parse(source))


# What an audit checks the work of. It must not repeat a mistake of theirs, so it must not get at them by any way.
AUDITED = {
    "engine",
    "handling",
    "service",
    "kafka.membership",
    "kafka.producer",
    "kafka.reader",
    "messages.batch",
    "messages.decode",
    "messages.formats",
    "messages.identity",
    "messages.incoming",
    "messages.outputs",
    "messages.record",
    "messages.stored",
    "postgres.claims",
    "postgres.inbox",
    "postgres.ledger",
}


def reached(start: str) -> set[str]:
    """Every module that those below `start` import, by whatever way."""
    trees = dict(modules())
    found: set[str] = set()
    waiting = [module for module in trees if module.startswith(start)]
    assert waiting
    while waiting:
        for name in imported(trees[waiting.pop()]):
            parts = name.removeprefix("processor.").split(".")
            known = {".".join(parts[:length]) for length in range(1, len(parts) + 1)} & trees.keys()
            waiting += known - found
            found |= known
    return found


def audited(found: set[str]) -> set[str]:
    return {module for module in found if any(f"{module}.".startswith(f"{one}.") for one in AUDITED)}


def test_the_audit_shares_no_code_with_what_it_audits() -> None:
    found = reached("operations.verify")
    assert {"kafka.scan", "postgres.audit", "settings.schema"} <= found
    assert audited(found) == set()
    assert audited(reached("operations.redrive")), "the search finds what is there"


def test_handlers_import_nothing_but_the_public_names() -> None:
    for path in (PACKAGE.parent / "handlers").glob("*.py"):
        ours = {name for name in imported(ast.parse(path.read_text())) if name.startswith("processor")}
        assert ours <= {"processor", *(f"processor.{name}" for name in processor.__all__)}, path.name


def test_a_rebalance_is_answered_by_its_callbacks_and_by_nothing_else() -> None:
    """librdkafka takes any such call for the answer to a rebalance, also of one that still waits in its queue."""
    answering = {"assign", "unassign", "incremental_assign", "incremental_unassign"}

    def answers(function: ast.AST) -> int:
        return sum(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in answering
            and "consumer" in ast.unparse(node.func.value)
            for node in ast.walk(function)
        )

    tree = ast.parse((PACKAGE / "kafka" / "membership.py").read_text())
    found = {node.name: answers(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert {name for name, count in found.items() if count} == {"_on_assign", "_on_revoke", "_on_lost"}
    assert "subscribe(" not in (PACKAGE / "kafka" / "reader.py").read_text(), "the client that reads is in no group"
