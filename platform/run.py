"""Compatibility import: `run` lives in `dbo.platform.runs.runner`."""

from dbo.platform.runs.runner import Prepared, Result, prepare, run

__all__ = ["Prepared", "Result", "prepare", "run"]
