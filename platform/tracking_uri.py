"""Which MLflow stores may be named, and which one it is where none is named."""

from pathlib import Path
from urllib.parse import urlsplit

from dbo.platform.errors import InputError
from dbo.platform.masking import has_secret_parameter

OFF = "off"
ALLOWED = "null (a sqlite file with the results), off, sqlite:///FILE.db, http(s)://HOST:PORT, postgresql://HOST/NAME"
_SERVERS = ("http", "https", "postgresql", "postgresql+psycopg2")


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
