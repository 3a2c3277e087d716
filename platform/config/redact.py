"""Redact credentials in URLs before anything is printed or recorded."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_USER = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s'\"<>]*@")
_QUERY = re.compile(r"([?&;#]([\w.%+-]+)=)[^&;\s'\"<>]+")
_SECRET = re.compile(r"token|pass|pwd|secret|key|signature|sig|credential|auth", re.IGNORECASE)
_VIEW = "viewStateShareKey"         # names a view of the MLflow UI; not a secret, despite its name


def redact(text: str) -> str:
    """Return `s3://user:word@host/a?token=x` as `s3://***@host/a?token=***`; other text stays as it is."""
    return _QUERY.sub(lambda found: f"{found[1]}***" if _secret(found[2]) else found[0], _USER.sub(r"\1***@", text))


def redact_all(data: Any) -> Any:
    """Redact every text in plain data."""
    if isinstance(data, Mapping):
        return {key: redact_all(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [redact_all(value) for value in data]
    return redact(data) if isinstance(data, str) else data


def has_secret_parameter(url: str) -> bool:
    """Decide whether a URL has a password, a token or the like as a parameter: `…?password=x`."""
    return any(_secret(found[2]) for found in _QUERY.finditer(url))


def _secret(name: str) -> bool:
    return unquote(name) != _VIEW and _SECRET.search(unquote(name)) is not None
