"""Run, compare and sweep decentralized bilevel optimization algorithms. The public API, imported lazily.

    import dbo

    result = dbo.run(algorithm="c2dfb", nodes=10, topology="ring", rounds=50)
    result.history            # pandas.DataFrame, a row per evaluation
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbo.platform.config.experiment import Experiment as Experiment

_HOME = {
    "Experiment": "dbo.platform.config.experiment",
}

__all__ = [*_HOME]

# In a checkout the packages lie beside this folder, not inside it: `dbo.platform` is <root>/platform. A wheel has them
# inside. Without this line a process whose working directory is the checkout would find `dbo`, but not `dbo.platform`.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "platform").is_dir():
    __path__.append(str(_root))


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dbo' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
