"""Start the engine that an experiment's settings describe."""

import os
import sys

from dbo.platform.config.engines import EngineSettings, LocalSettings
from dbo.platform.engine.base import Engine, RunSpec
from dbo.platform.engine.local import LocalEngine
from dbo.platform.engine.placement import pack_nodes
from dbo.platform.engine.ray_engine import RayEngine
from dbo.platform.engine.ray_session import connect


def start_engine(settings: EngineSettings, spec: RunSpec) -> Engine:
    """Return the engine, its blocks placed and ready for the first round."""
    if isinstance(settings, LocalSettings):
        blocks = spec.blocks or [range(spec.network.nodes)]
        return LocalEngine(
            spec.algorithm, spec.config, spec.problem, spec.network, blocks, threads=settings.threads,
            device=settings.device, batches=spec.batches, schedules=spec.schedules)
    ray = connect(settings.address)
    has_server = spec.network.server is not None
    blocks = spec.blocks or pack_nodes(settings, ray, spec.network.nodes - has_server, has_server)
    return RayEngine(settings, ray, spec, blocks)


def startup_notice(settings: EngineSettings) -> str | None:
    """Return what the user waits for before the first round; None if there is nothing to wait for."""
    if isinstance(settings, LocalSettings):
        return None
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return None
    return "connecting to Ray" if settings.address or os.environ.get("RAY_ADDRESS") else "starting Ray on this machine"
