"""Validate MLflow tracking URIs, and choose the store of a folder."""

import os
from pathlib import Path
from urllib.parse import urlsplit

from dbo.platform.config.redact import has_redacted_path, has_secret_parameter, redact
from dbo.platform.errors import InputError

OFF = "off"
ALLOWED = "null (a sqlite file with the results), off, sqlite:///FILE.db, http(s)://HOST:PORT, postgresql://HOST/NAME"
_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "postgresql+psycopg2": 5432}
_MLFLOW_FILE = "~/.mlflow/credentials"
_MLFLOW_NAMES = tuple(f"MLFLOW_TRACKING_{name}" for name in ("USERNAME", "PASSWORD", "TOKEN", "AUTH", "AWS_SIGV4"))


def validate_uri(field: str, uri: str | None) -> None:
    """Refuse a URI of an unsupported store, and one with a password in it, which would be recorded."""
    if uri is None or uri == OFF:
        return
    if has_redacted_path(uri):
        raise InputError(f"{field}: {uri} lacks the server's path, which is never recorded; give the whole URI")
    try:
        parts = urlsplit(uri)
        valid = bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        parts, valid = urlsplit(""), False
    has_user = parts.username is not None and parts.scheme.startswith("http")
    if parts.password is not None or has_user or has_secret_parameter(uri):
        names = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        raise InputError(
            f"{field}: a name, password or token in the URI is not allowed; "
            f"set {names if parts.scheme.startswith('http') else 'PGPASSWORD'} in the environment"
        )
    if parts.scheme == "sqlite":
        valid = sqlite_file(uri) is not None
    if parts.scheme not in (*_PORTS, "sqlite") or not valid:
        shown = "a URI with an @" if "@" in uri else repr(uri)          # which may contain a password
        raise InputError(f"{field}: {shown} is not allowed; allowed: {ALLOWED}")


def validate_recorded_uri(field: str, uri: object) -> None:
    """Refuse the store that a folder names if it is a server that would receive this machine's credentials.

    Whoever wrote the folder could name a server of their own, and MLflow's client sends credentials to any server.
    """
    if not isinstance(uri, str | None):
        raise InputError(f"{field}: {uri!r} is not allowed; allowed: {ALLOWED}")
    validate_uri(field, uri)
    if uri is None or uri == OFF:
        return
    if found := find_exposed_credentials(uri):
        raise InputError(
            f"{field}: {redact(uri)} would receive the credentials in {found}, and is not the server of "
            f"MLFLOW_TRACKING_URI; if it is yours, give --uri {redact(uri)}"
        )


def find_exposed_credentials(uri: str) -> str:
    """Return where credentials are stored that MLflow's client would send to this server, which they are not for."""
    if sqlite_file(uri) is not None or _server(uri) == _server(os.environ.get("MLFLOW_TRACKING_URI", "")):
        return ""
    names = _MLFLOW_NAMES if uri.lower().startswith("http") else ("PGPASSWORD",)
    found = [name for name in names if os.environ.get(name)]
    if names is _MLFLOW_NAMES and Path(_MLFLOW_FILE).expanduser().exists():
        found.append(_MLFLOW_FILE)
    return ", ".join(found)


def _server(uri: str) -> tuple[str, str | None, int | None] | None:
    """Return scheme, host and port."""
    try:
        parts = urlsplit(uri)
        return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None


def resolve_uri(uri: str | None, root: Path) -> str:
    """Return the store for the runs in `root`.

    Without a URI: one sqlite file for everything below runs/ of the working directory; else a file in the folder
    itself, unless the group or the runs/ folder around it has one.
    """
    if uri is not None:
        file = sqlite_file(uri)
        return f"sqlite:///{file.resolve()}" if file is not None else uri
    root, runs = root.resolve(), Path("runs").resolve()
    if root.is_relative_to(runs):
        return f"sqlite:///{runs / 'mlflow.db'}"
    for folder in (root, *root.parents):
        ours = folder == root or folder.name == "runs" or (folder / "group.json").exists()
        if ours and (folder / "mlflow.db").exists():
            return f"sqlite:///{folder / 'mlflow.db'}"
    return f"sqlite:///{root / 'mlflow.db'}"


def sqlite_file(uri: str) -> Path | None:
    """Return the sqlite file of a store; None: it is a server."""
    if not uri.startswith("sqlite:///"):
        return None
    name = uri.removeprefix("sqlite:///").partition("?")[0]
    return Path(name) if name.strip() and name != ":memory:" and not name.endswith("/") else None
