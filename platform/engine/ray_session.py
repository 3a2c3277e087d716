"""Connect to the Ray cluster of a command: the one that is named, or an own one on loopback that ends with it."""

import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

from dbo.platform.errors import InputError, RunError

_connected: str | None = None      # None: this process was connected by other code


def connect(address: str | None) -> Any:
    """Return the `ray` module, connected. All runs of a process share one connection; it ends with the process."""
    address = address or os.environ.get("RAY_ADDRESS")
    if "ray" not in sys.modules:
        _prepare_environment(own=not address)
    import ray

    global _connected
    if ray.is_initialized():
        if address and _connected not in (None, address):
            raise InputError(f"engine.address: {address} is not allowed; this process is connected to {_connected}")
        return ray
    _connected = address or "a cluster of its own"
    if not address:
        try:
            ray.init(
                address="local", include_dashboard=False, log_to_driver=False, configure_logging=False,
                _node_ip_address="127.0.0.1",
            )
        except Exception as error:
            reason = f"{type(error).__name__}: {_first_line(error)}"
            raise RunError(f"Ray cannot be started here: {reason}; engine.name=local needs no Ray") from error
        return ray
    _probe(address)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"engine.address: no Ray cluster answers at {address}: {_first_line(error)}") from None
    return ray


def _probe(address: str) -> None:
    """Raise `InputError` if nothing listens at the address: Ray itself would retry for minutes."""
    host, _, port = address.rpartition("://")[2].rstrip("/").rpartition(":")
    if not port.isdigit() or not host:
        return                 # "auto" and the like
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise InputError(f"engine.address: no Ray cluster answers at {address}: {error.strerror or error}") from None


def prepare_client() -> None:
    """Make Ray's client use the token of this machine; by default it does not look for one."""
    if "ray" not in sys.modules:
        _prepare_environment(own=False)


def _prepare_environment(own: bool) -> None:
    """Set the variables that Ray reads once, when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")      # the driver reports the first error, once
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if own:
        # An own token, passed to the workers through the environment: no other user of the machine can submit work to
        # this cluster, and no token stays behind in the home folder.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"      # on every system this means: loopback only
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    else:
        os.environ.setdefault("RAY_AUTH_MODE", "token" if has_token() else "disabled")


def has_token() -> bool:
    """Decide whether there is a Ray token where Ray looks for it."""
    configured = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    return configured or (Path.home() / ".ray" / "auth_token").exists()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
