"""Which MLflow stores may be named, and which one it is where none is named."""

import os
from pathlib import Path
from urllib.parse import urlsplit

from dbo.platform.config.redact import has_secret_parameter, masked
from dbo.platform.errors import InputError

OFF = "off"
ALLOWED = "null (a sqlite file with the results), off, sqlite:///FILE.db, http(s)://HOST:PORT, postgresql://HOST/NAME"
_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "postgresql+psycopg2": 5432}
_SERVERS = tuple(_PORTS)
_MLFLOW_FILE = "~/.mlflow/credentials"
_MLFLOW_NAMES = tuple(f"MLFLOW_TRACKING_{name}" for name in ("USERNAME", "PASSWORD", "TOKEN", "AUTH", "AWS_SIGV4"))


def check(field: str, uri: str | None) -> None:
    """An MLflow store that is none of ours to use is an input error; a password in it too, for it would be recorded."""
    if uri is None or uri == OFF:
        return
    try:
        parts = urlsplit(uri)
        good = bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        parts, good = urlsplit(""), False
    named = parts.username is not None and parts.scheme.startswith("http")
    if parts.password is not None or named or has_secret_parameter(uri):
        names = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        raise InputError(
            f"{field}: a name, password or token in the URI is not allowed; "
            f"set {names if parts.scheme.startswith('http') else 'PGPASSWORD'} in the environment"
        )
    if parts.scheme == "sqlite":
        good = file_of(uri) is not None
    if parts.scheme not in (*_SERVERS, "sqlite") or not good:
        shown = "a URI with an @" if "@" in uri else repr(uri)          # which may hide a password
        raise InputError(f"{field}: {shown} is not allowed; allowed: {ALLOWED}")


def check_recorded(field: str, uri: object) -> None:
    """The store that a folder names. If it is a server, it must be one that the credentials which lie here are for:
    whoever wrote the folder could name a server of their own, and MLflow's client gives them to any."""
    if not isinstance(uri, str | None):
        raise InputError(f"{field}: {uri!r} is not allowed; allowed: {ALLOWED}")
    check(field, uri)
    if uri is None or uri == OFF:
        return
    if found := exposed(uri):
        raise InputError(
            f"{field}: {masked(uri)} would be given what is in {found}, and is not the server of MLFLOW_TRACKING_URI; "
            f"if it is yours, give --uri {masked(uri)}"
        )


def exposed(uri: str) -> str:
    """Where credentials lie that a client of this server would send along, though nobody said that they are for it."""
    if file_of(uri) is not None or _server(uri) == _server(os.environ.get("MLFLOW_TRACKING_URI", "")):
        return ""
    names = _MLFLOW_NAMES if uri.lower().startswith("http") else ("PGPASSWORD",)
    found = [name for name in names if os.environ.get(name)]
    if names is _MLFLOW_NAMES and Path(_MLFLOW_FILE).expanduser().exists():
        found.append(_MLFLOW_FILE)
    return ", ".join(found)


def _server(uri: str) -> tuple[str, str | None, int | None] | None:
    """Scheme, host and port."""
    try:
        parts = urlsplit(uri)
        return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None


def place(uri: str | None, root: Path) -> str:
    """The store for what lies in `root`.

    Where none is named: one for all that is below runs/ of the working directory, else a file in the folder itself,
    unless the group or the runs/ that it belongs to has one.
    """
    if uri is not None:
        file = file_of(uri)
        return f"sqlite:///{file.resolve()}" if file is not None else uri
    root, runs = root.resolve(), Path("runs").resolve()
    if root.is_relative_to(runs):
        return f"sqlite:///{runs / 'mlflow.db'}"
    for folder in (root, *root.parents):
        ours = folder == root or folder.name == "runs" or (folder / "group.json").exists()
        if ours and (folder / "mlflow.db").exists():
            return f"sqlite:///{folder / 'mlflow.db'}"
    return f"sqlite:///{root / 'mlflow.db'}"


def file_of(uri: str) -> Path | None:
    """The sqlite file that a store lies in; None: it is a server."""
    if not uri.startswith("sqlite:///"):
        return None
    name = uri.removeprefix("sqlite:///").partition("?")[0]
    return Path(name) if name.strip() and name != ":memory:" and not name.endswith("/") else None
