"""Compatibility import: `Experiment` lives in `dbo.platform.config.experiment`."""

from dbo.platform.config.experiment import Experiment

__all__ = ["Experiment"]
