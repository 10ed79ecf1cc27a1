"""Who may import whom: each client library has one door, so that its errors and threads have one too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import processor

PACKAGE = Path(processor.__file__).parent
MODULES = sorted(path for path in PACKAGE.glob("*.py"))

CONFLUENT = {"check", "cluster", "consumer", "librdkafka", "membership", "transaction", "dlq"}
ASYNCPG = {"arrays", "check", "migrate", "postgres", "sqlstates"}
# The parts that decide without any client, clock or thread; that is what makes them testable row by row.
PURE = {"decode", "failpoints", "identity", "outputs", "records", "recovery", "spans"}
CLIENTS = {"confluent_kafka", "asyncpg", "processor.postgres", "processor.consumer", "processor.transaction"}


def imported(path: Path) -> set[str]:
    """Modules imported at run time; what only type checkers see does not count."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def uses(path: Path, library: str) -> bool:
    return any(name == library or name.startswith(f"{library}.") for name in imported(path))


@pytest.mark.parametrize(("library", "allowed"), [("confluent_kafka", CONFLUENT), ("asyncpg", ASYNCPG)])
def test_only_its_own_modules_use_a_client_library(library: str, allowed: set[str]) -> None:
    assert {path.stem for path in MODULES if uses(path, library)} == allowed


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_modules_know_no_client(name: str) -> None:
    assert not {client for client in CLIENTS if uses(PACKAGE / f"{name}.py", client)}


def test_handlers_import_nothing_but_the_public_names() -> None:
    for path in (PACKAGE.parent / "handlers").glob("*.py"):
        ours = {name for name in imported(path) if name.startswith("processor")}
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

    tree = ast.parse((PACKAGE / "membership.py").read_text())
    found = {node.name: answers(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert {name for name, count in found.items() if count} == {"_on_assign", "_on_revoke", "_on_lost"}
    assert "subscribe(" not in (PACKAGE / "consumer.py").read_text(), "the client that reads is in no group"
