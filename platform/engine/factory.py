"""Start the engine that an experiment's settings describe."""

import os
import sys
from dataclasses import dataclass

from dbo.platform.config.engines import EngineSettings, LocalSettings
from dbo.platform.engine.base import Engine, RunSpec
from dbo.platform.engine.local import LocalEngine
from dbo.platform.engine.placement import bundle_for, pack_nodes
from dbo.platform.engine.ray_engine import RayEngine
from dbo.platform.engine.ray_session import connect
from dbo.platform.errors import InputError


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


def check_request(settings: EngineSettings, nodes: int) -> None:
    """Refuse what this machine can never offer, before data are loaded or Ray is started.

    A cluster may still grow, so what is requested of one is not checked here.
    """
    if isinstance(settings, LocalSettings):
        if settings.device == "cuda" and not _count_gpus():
            raise InputError("engine.device: cuda is not allowed; torch finds no GPU on this machine; use cpu")
        return
    ray = sys.modules.get("ray")
    if settings.address or os.environ.get("RAY_ADDRESS") or (ray is not None and ray.is_initialized()):
        return
    machine = _Machine({"CPU": os.cpu_count() or 1, "GPU": _count_gpus() if settings.gpus_per_node else 0})
    bundles = [bundle_for(settings, len(block)) for block in pack_nodes(settings, machine, nodes)]
    for kind, key in (("GPU", "gpus_per_node"), ("CPU", "cpus_per_node")):
        needed, offered = sum(bundle.get(kind, 0.0) for bundle in bundles), machine.resources[kind]
        if needed > offered:
            raise InputError(
                f"engine.{key}: {getattr(settings, key)} is not allowed; the actors of {nodes} nodes need "
                f"{needed:g} {kind}s, this machine has {offered:g}; lower it, raise engine.nodes_per_actor, or name a "
                f"cluster with engine.address")


@dataclass(frozen=True, slots=True)
class _Machine:
    """This machine, as `pack_nodes` sees a cluster."""

    resources: dict[str, float]

    def cluster_resources(self) -> dict[str, float]:
        return self.resources


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def startup_notice(settings: EngineSettings) -> str | None:
    """Return what the user waits for before the first round; None if there is nothing to wait for."""
    if isinstance(settings, LocalSettings):
        return None
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return None
    return "connecting to Ray" if settings.address or os.environ.get("RAY_ADDRESS") else "starting Ray on this machine"
