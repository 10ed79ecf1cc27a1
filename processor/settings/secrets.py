"""What must not be shown, and how it is taken out of what is shown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from pydantic import SecretStr

HIDDEN = "***"


def revealed(value: Any) -> Any:
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def hidden(value: Any) -> Any:
    return HIDDEN if isinstance(value, SecretStr) else value


def hide_password(url: str) -> str:
    """The URL with `***` for its password; when in doubt, more is hidden rather than less."""
    hidden = re.sub(r"(://[^:@/?]*):.*@", rf"\1:{HIDDEN}@", url, flags=re.DOTALL)
    return re.sub(r"((?:ssl)?password=)[^&]*", rf"\1{HIDDEN}", hidden)


def passwords(url: str) -> set[str]:
    """The URL's passwords, both as they stand in it and decoded."""
    parts = urlsplit(url)
    password = parts.netloc.rpartition("@")[0].partition(":")[2]
    return {password, unquote(password), *parse_qs(parts.query).get("password", [])}


def redact(text: str, url: str, secrets: Iterable[Any]) -> str:
    """The text without the URL's passwords and without those of `secrets` that are a SecretStr."""
    found = {value.get_secret_value() for value in secrets if isinstance(value, SecretStr)} | passwords(url)
    text = text.replace(url, hide_password(url))
    # Anything shorter is hardly a secret, and replacing it would take ordinary words apart.
    for secret in sorted((secret for secret in found if len(secret) > 3), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text
