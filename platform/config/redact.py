"""Redact credentials in URLs before anything is printed or recorded.

A secret may be anywhere in a URL: before the @, in a parameter of any name or of none, or in the path. `redact` works
on any text and keeps what is known to be harmless. `redact_url` is for a setting that is a URL: of a web address it
keeps the host only, because nobody can tell a secret path from another one.
"""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_USER = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s'\"<>]*@")
_QUERY = re.compile(r"([?&;#]([\w.%+-]+)=)[^&;\s'\"<>]+")
_SECRET = re.compile(r"token|pass|pwd|secret|key|signature|sig|credential|auth", re.IGNORECASE)
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://([^/?#\s'\"<>]*)([^?#\s'\"<>]*)(\?[^#\s'\"<>]*)?")
_TOKEN = re.compile(r"(?=[0-9]*[A-Za-z])(?=[A-Za-z]*[0-9])[A-Za-z0-9]{20,}")       # letters and digits, mixed and long
_VIEW = "viewStateShareKey"         # names a view of the MLflow UI; not a secret, despite its name
# Parameters of data base and MLflow URLs that hold no secret. The values of all others in a URL are redacted.
_PUBLIC = frozenset({_VIEW, "compareRunsMode", "sslmode", "connect_timeout", "application_name", "region", "mode"})
_LOCAL = frozenset({"sqlite", "file", "local", "memory"})
_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hdfs", "hf", "oss", "oci", "r2"})
_DATABASES = frozenset({"postgresql", "postgresql+psycopg2"})
_HARMLESS = re.compile(r"[0-9.]{1,6}|true|false", re.IGNORECASE)       # values of a parameter
_HIDDEN = "***"


def redact(text: str) -> str:
    """Return `https://user:word@host/a?token=x` as `https://***@host/a?token=***`; other text stays as it is."""
    text = _QUERY.sub(
        lambda found: f"{found[1]}{_HIDDEN}" if _is_secret(found[2]) else found[0], _USER.sub(rf"\1{_HIDDEN}@", text))
    return _URL.sub(lambda found: _join(found, _redact_path(found[1], found[3])), text)


def redact_url(url: str) -> str:
    """Return a URL as `redact` does, and of a web address without its path: `https://host/***`."""
    return hide_path(redact(url))


def hide_path(url: str) -> str:
    """Return a URL, of a web address without its path. Files, objects in a store and data bases keep theirs."""
    def replace(found: re.Match[str]) -> str:
        is_kept = found[1].lower() in _LOCAL | _STORES | _DATABASES or found[3] in ("", "/")
        return f"{found[1]}://{found[2]}{found[3] if is_kept else f'/{_HIDDEN}'}{found[4] or ''}"

    return _URL.sub(replace, url)


def redact_server(text: str, url: str) -> str:
    """Redact a text, and in it the path of a web address, which libraries quote without the address too."""
    found = _URL.match(url)
    path = found[3].rstrip("/") if found and found[1].lower() not in _LOCAL | _STORES | _DATABASES else ""
    return redact(text.replace(path, f"/{_HIDDEN}") if path else text)


def redact_all(data: Any) -> Any:
    """Redact every text in plain data."""
    if isinstance(data, Mapping):
        return {key: redact_all(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [redact_all(value) for value in data]
    return redact(data) if isinstance(data, str) else data


def hide_tracking_path(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tracking section without the path of its server, which may hold a secret."""
    uri = section.get("uri")
    return {**section, **({"uri": hide_path(uri)} if isinstance(uri, str) else {})}


def has_redacted_path(url: str) -> bool:
    """Decide whether `redact_url` has removed the path of a URL."""
    return url.endswith(f"/{_HIDDEN}")


def has_secret_parameter(url: str) -> bool:
    """Decide whether a URL has a parameter that may be a password or a token: `…?password=x`, `…?x`."""
    without_user = _USER.sub(r"\1", url)
    return redact(without_user) != without_user


def _join(found: "re.Match[str]", path: str) -> str:
    """Return a URL with another path; values of unknown parameters, and parameters without a name, are redacted."""
    scheme, host, query = found[1], found[2], found[4] or ""
    if scheme.lower() in _LOCAL or not query:
        return f"{scheme}://{host}{path}{query}"
    parameters = [_redact_parameter(parameter) for parameter in re.split(r"([&;])", query[1:])]
    return f"{scheme}://{host}{path}?{''.join(parameters)}"


def _redact_parameter(parameter: str) -> str:
    name, sign, value = parameter.partition("=")
    is_public = unquote(name) in _PUBLIC or (_HARMLESS.fullmatch(value) and not _is_secret(name))
    if parameter in ("", "&", ";") or (sign and is_public):
        return parameter
    return f"{name}={_HIDDEN}" if sign else _HIDDEN


def _redact_path(scheme: str, path: str) -> str:
    """Redact the segments of a path that look like a token; local files and objects in a store have names like that."""
    return path if scheme.lower() in _LOCAL | _STORES else _TOKEN.sub(_HIDDEN, path)


def _is_secret(name: str) -> bool:
    return unquote(name) != _VIEW and _SECRET.search(unquote(name)) is not None
