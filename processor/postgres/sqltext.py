"""What the text of a statement says by itself, without any catalogue: what it does, and what it names.

It answers only where it is sure, and it has to be sure of little: the text is one that Postgres has accepted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<skipped> \s+
          | --[^\n]* | /\*.*?\*/ | E'(?:[^'\\]|\\.|'')*' | '(?:[^']|'')*' | \$(\w*)\$.*?\$\2\$ | \$?\d[\w.]* )
      | (?P<strange> U&['"] )
      | "(?P<quoted> (?:[^"]|"")* )"
      | (?P<word> [^\W\d][\w$]* )
      | (?P<mark> . )""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_COMMANDS = frozenset({"select", "values", "with", "insert", "update", "delete", "merge"})
_CHANGES = frozenset({"insert", "update", "delete", "merge"})
# fmt: off
_STATEMENTS = _COMMANDS | frozenset(
    {
        "from", "table", "perform", "execute", "call", "do", "open", "fetch", "move", "for", "foreach", "copy",
        "truncate", "lock", "notify", "listen", "unlisten", "set", "reset", "create", "alter", "drop", "grant",
        "revoke", "comment", "import", "refresh", "reindex", "cluster", "vacuum", "analyze", "prepare",
        "deallocate", "discard", "explain", "show", "load", "security", "reassign", "checkpoint", "start",
        "commit", "rollback", "savepoint", "release", "abort",
    }
)
# fmt: on


class _Token(NamedTuple):
    name: str
    keyword: str  # the same; empty for a quoted name, which is none
    depth: int  # how many parentheses are around it


@dataclass(frozen=True)
class Said:
    """What a statement says. All names are in lower case."""

    change: str | None  # insert, update, delete or merge; None if it changes nothing, or several things, or who knows
    assigned: frozenset[str]  # the columns that an UPDATE may set, and other words near them
    called: frozenset[str]  # every function that is called with parentheses, and other words before them
    dotted: frozenset[str]  # every word behind a dot: `t.f` may be a column, or the function f called for the row t


def read(sql: str) -> Said | None:
    """Read a statement; return None if it is no plain reading or writing of tables, or is not understood."""
    tokens = _tokens(sql)
    if not tokens or tokens[0].keyword not in _COMMANDS:
        return None
    changes = [at for at in range(len(tokens)) if _is_change(tokens, at)]
    change, assigned = None, frozenset[str]()
    if len(changes) == 1 and tokens[changes[0]].depth == 0:
        change = tokens[changes[0]].keyword
        assigned = _assigned(tokens[changes[0] :])
    return Said(change, assigned, *_names(tokens))


def names(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the functions that an expression may call, as in `Said.called` and `Said.dotted`."""
    return _names(_tokens(text) or [])


def words(text: str) -> frozenset[str] | None:
    """Return every word of a text; None if it is not understood."""
    tokens = _tokens(text)
    return None if tokens is None else frozenset(token.name for token in tokens)


def may_run_statements(body: str) -> bool:
    """Return whether a function in PL/pgSQL may do more than calculate: each statement has one of these words.

    An expression may read a table without SELECT: `total := sum(amount) FROM entries`.
    """
    tokens = _tokens(body)
    return tokens is None or any(token.keyword in _STATEMENTS for token in tokens)


def _tokens(sql: str) -> list[_Token] | None:
    """Return names and marks; strings and numbers say nothing. None if the text has something out of the ordinary."""
    tokens: list[_Token] = []
    depth = 0
    for token in _TOKEN.finditer(sql):
        if skipped := token["skipped"]:
            if (skipped.startswith("/*") and "/*" in skipped[2:]) or (skipped.startswith("'") and "\\" in skipped):
                return None  # Postgres nests comments, and may read a backslash in a string as an escape
            continue
        if token["strange"]:
            return None
        if token["quoted"] is not None:
            tokens.append(_Token(token["quoted"].replace('""', '"').lower(), "", depth))
            continue
        text = (token["mark"] or token["word"]).lower()
        depth -= text == ")"
        tokens.append(_Token(text, text, depth))
        depth += text == "("
    return tokens


def _is_change(tokens: list[_Token], at: int) -> bool:
    """Return whether a command begins here: FOR [NO KEY] UPDATE and ON CONFLICT … DO UPDATE are none."""
    return tokens[at].keyword in _CHANGES and (at == 0 or tokens[at - 1].keyword not in ("for", "key", "do"))


def _assigned(tokens: list[_Token]) -> frozenset[str]:
    """Return all words behind the SET of a command, as far as columns can be assigned there."""
    found = set()
    assigns = False
    for before, token in pairwise(tokens):
        if token.depth == 0 and before.keyword not in (".", "as"):  # after those it is a name
            assigns |= token.keyword == "set"
            if assigns and (
                token.keyword in ("where", "returning") or (token.keyword == "from" and before.keyword != "distinct")
            ):
                break
        if assigns:
            found.add(token.name)
    return frozenset(found)


def _names(tokens: list[_Token]) -> tuple[frozenset[str], frozenset[str]]:
    called, dotted = set(), set()
    for token, after in pairwise(tokens):
        if after.keyword == "(":
            called.add(token.name)
        if token.keyword == ".":
            dotted.add(after.name)
    return frozenset(called), frozenset(dotted)
