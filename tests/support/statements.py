"""All SQL that the modules of the processor have ready."""

from __future__ import annotations

import importlib
import pkgutil
import re

import processor
from processor.postgres import schemas


def ours() -> dict[str, str]:
    """The statements that name a table of ours, by where they stand."""
    found = {}
    for module in pkgutil.walk_packages(processor.__path__, "processor."):
        if module.ispkg or module.name.startswith(("processor.__main__", "processor.stack.")):
            continue
        for name, sql in vars(importlib.import_module(module.name)).items():
            if isinstance(sql, str) and re.match(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\s", sql):
                found[f"{module.name}.{name}"] = sql
    found = {where: sql for where, sql in found.items() if set(schemas.OURS) & set(re.findall(r"\w+", sql))}
    assert {
        "processor.postgres.claims.CLAIM",
        "processor.postgres.ledger.ADVANCE",
        "processor.postgres.dead_letters.LIST",
    } <= found.keys()
    assert len(found) > 40
    return found
