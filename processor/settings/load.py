"""Read, merge and check one deployment's settings: `config/*.toml`, overridden by the environment.

Every problem is one line, `file: key: what is wrong`, and never repeats a value that could be a secret.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from processor.errors import ConfigError
from processor.settings import librdkafka, sources
from processor.settings.schema import PROFILES, HandlerSettings, Settings
from processor.settings.sources import PREFIX, Problem

KEYS = tuple(name for name in Settings.model_fields if name != "source")
TABLES = ("message", "kafka", "database", "batch", "retry", "failure", "effects", "retention", "run")


def load(path: str | Path, environ: Mapping[str, str] | None = None, judge: librdkafka.Judge | None = None) -> Settings:
    """One deployment's settings, or a ConfigError with one line for each problem.

    `judge` is asked about librdkafka's properties: only that library knows which exist, and with which values.
    """
    source, base = str(path), Path(path).parent
    environ = os.environ if environ is None else environ
    file = sources.from_file(Path(path), Settings)
    variables = sources.from_environment(environ, frozenset(KEYS) | {"topic"}, base)
    problems = file.problems + variables.problems + _stray_variables(environ)

    if {"topic", "topics"} & variables.tables.keys():
        file.tables = {key: value for key, value in file.tables.items() if key not in ("topic", "topics")}
    values = sources.merge(file.tables, variables.tables)
    single = "topic" in values
    if single and "topics" in values:
        problems.append(Problem(("topics",), "give either topic or topics, not both"))
    elif single:
        values["topics"] = values["topic"]
    values.pop("topic", None)
    for key in [key for key in values if key not in KEYS]:
        problems.append(_unknown((key,)))
        del values[key]
    problems += _locate_migrations(values, base)
    if judge is not None:
        problems += _judged(values, judge)
    if isinstance(batch := values.setdefault("batch", {}), dict):
        values["batch"] = {**PROFILES.get(str(values.get("profile")), {}), **batch}

    try:
        settings = Settings(**values, source=source)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        problems += [problem for detail in details for problem in _problems(detail, values)]
    else:
        if not problems:
            return settings
    raise ConfigError("\n".join(_lines(source, problems, variables.variables, single)))


def _judged(values: Mapping[str, Any], judge: librdkafka.Judge) -> list[Problem]:
    """The properties that our own rules accept and librdkafka refuses."""
    problems = []
    for table in sources.PROPERTY_TABLES:
        given = _given(values, ("kafka", table))
        for name, value in sources.flatten(given if isinstance(given, Mapping) else {}):
            if not isinstance(value, (str, int, float)) or librdkafka.refusal(table, name, value):
                continue
            if reason := judge(name, value):
                problems.append(Problem(("kafka", table, name), reason))
    return problems


def _locate_migrations(values: dict[str, Any], base: Path) -> list[Problem]:
    database = values.get("database")
    folders = database.get("migrations") if isinstance(database, dict) else None
    if not isinstance(database, dict) or not isinstance(folders, list):
        return []
    problems = []
    located: list[Any] = []
    for folder in folders:
        located.append(sources.locate(folder, base) if isinstance(folder, str) else folder)
        if isinstance(folder, str) and not located[-1].is_dir():
            problems.append(Problem(("database", "migrations"), f"{folder}: no such folder"))
    database["migrations"] = located
    return problems


def _names_at(path: tuple[str, ...]) -> list[str]:
    """The valid keys of the table at this path."""
    if not path:
        return ["topic", *KEYS]
    if path[0] == "handlers":
        return list(HandlerSettings.model_fields)
    model: Any = Settings
    for key in path:
        model = model.model_fields[key].annotation
    names = list(model.model_fields)
    return names + [f"{key[-1]}_file" for key in sources.SECRET_KEYS if key[:-1] == path]


def _unknown(path: tuple[str, ...]) -> Problem:
    """Name the nearest key: first a neighbour, then one of that name in another table."""
    *parents, key = path
    names = _names_at(tuple(parents))
    near = difflib.get_close_matches(key.replace("-", "_").lower(), names, n=1, cutoff=0.6)
    if near:
        hint = f"did you mean {'.'.join((*parents, near[0]))}?"
    else:
        elsewhere = [(table, key) for table in TABLES if key in _names_at((table,))]
        hint = f"did you mean {'.'.join(elsewhere[0])}?" if elsewhere else f"valid here: {', '.join(names)}"
    return Problem(path, f"unknown key; {hint}")


def _problems(detail: ErrorDetails, values: Mapping[str, Any]) -> list[Problem]:
    path = tuple(str(part) for part in detail["loc"] if isinstance(part, str) and part != "[key]")
    context = detail.get("ctx", {})
    if detail["type"] == "extra_forbidden":
        return [_unknown(path)]
    if detail["type"] == "refused":
        return [Problem((*path, name), reason) for name, reason in context["refused"]]
    if detail["type"] == "missing":
        if path in (("kafka",), ("database",)):  # each of these tables has one required key
            path = (*path, "bootstrap_servers" if path == ("kafka",) else "url")
        if path == ("topics",):
            path = ("topic",)
        return [Problem(path, f"is required; set it here or as {_variable(path)}")]
    if detail["type"] == "literal_error":
        return [Problem(path, _not_one_of(str(context["expected"]), _given(values, path)))]
    if detail["type"] == "tuple_type":
        return [Problem(path, "must be a list of strings")]
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type", "mapping_type"):
        return [Problem(path, f"must be a table; from the environment, set its keys: {_variable(path)}__…")]
    if _given(values, path) is None and detail["type"] in ("string_type", "none_required"):
        return []  # a secret file that could not be read; that problem is already reported
    text = str(context["error"]) if "error" in context else detail["msg"].replace("Input should be", "must be")
    return [Problem(path, text.removeprefix("Value error, "))]


def _not_one_of(expected: str, given: Any) -> str:
    names = re.findall(r"'([^']*)'", expected)
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.6)
    return f"must be one of {', '.join(names)}" + (f"; did you mean {near[0]}?" if near else "")


def _given(values: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _variable(path: tuple[str, ...]) -> str:
    section, *keys = path
    return PREFIX + "__".join((section.upper(), *(key if section == "handlers" else key.upper() for key in keys)))


def _stray_variables(environ: Mapping[str, str]) -> list[Problem]:
    """Variables that look like settings but are not: `PROCESSOR_DATABASE_URL`, `PROCESSOR_KAFAK__START`."""
    settings = {_variable((key,)) for key in ("topic", *KEYS)}
    for table in TABLES:
        settings |= {_variable((table, key)) for key in _names_at((table,))}
    squeezed = {name.replace("_", ""): name for name in settings}
    firsts = {key.upper(): key for key in ("topic", *KEYS)}
    problems = []
    for variable in sorted(environ):
        name = variable.removeprefix(PREFIX)
        first, *rest = name.split("__")
        if name == variable or name in sources.RESERVED or first.upper() in firsts:
            continue
        if meant := squeezed.get(variable.replace("_", "")):
            problems.append(Problem((variable,), f"unknown variable; did you mean {meant}?"))
        elif near := difflib.get_close_matches(first, firsts, n=1, cutoff=0.75 if rest else 0.85):
            meant = PREFIX + "__".join((near[0], *rest))
            problems.append(Problem((variable,), f"unknown variable; did you mean {meant}?"))
    return problems


def _lines(source: str, problems: list[Problem], variables: Mapping[tuple[str, ...], str], single: bool) -> list[str]:
    """One line for each problem, unknown keys first: a missing key is often just a misspelt one."""
    unknown = [problem for problem in problems if problem.text.startswith("unknown")]
    others = [problem for problem in problems if problem not in unknown]
    suggested = " ".join(problem.text for problem in unknown)
    lines = []
    for problem in unknown + others:
        key = ".".join(problem.path)
        if problem.text.startswith("is required") and f"did you mean {key}?" in suggested:
            continue
        if single and key == "topics":
            key = "topic"
        variable = variables.get(problem.path)
        origin = f" (from {variable})" if variable else ""
        lines.append(f"{source}: {key}{origin}: {' '.join(problem.text.split())}")
    return list(dict.fromkeys(lines))
