"""Define the settings of an experiment's `engine:` section. The engines themselves are in `platform.engine`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dbo.parameters import param


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """All nodes in this process, as one block of stacked rows."""

    runtime_only: ClassVar[frozenset[str]] = frozenset()
    max_recoveries: ClassVar[int] = 0

    threads: int = param(1, ge=1, help="threads of the linear algebra; results are bit-identical for equal counts")
    device: Literal["cpu", "cuda", "torch_cpu"] = param(
        "cpu", help="cpu: NumPy arrays; cuda: the GPU; torch_cpu: torch tensors on the CPU, to try the GPU's code"
    )

    @property
    def gpus_per_node(self) -> float:
        """The GPUs that the nodes share; 0 if their arrays are NumPy's."""
        return 0.0 if self.device == "cpu" else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """Nodes in Ray actors: one node per actor if the cluster has the CPUs or GPUs, several otherwise."""

    # These do not influence results: they may differ when a run is resumed.
    runtime_only: ClassVar[frozenset[str]] = frozenset(
        {
            "address", "placement", "placement_timeout", "step_timeout", "heartbeat_timeout", "max_recoveries",
            "transport",
        }
    )

    nodes_per_actor: int | Literal["auto"] = param("auto", help="rows per actor; auto: as few as fit")
    gpus_per_node: float = param(0.0, ge=0, help="share of a GPU for each node; 0: CPU")
    cpus_per_node: float | None = param(
        None, help="CPUs reserved for each node; null: the actors share what the cluster has")
    threads: int = param(1, ge=1, help="threads of an actor's linear algebra")
    address: str | None = param(None, help="a running cluster; null: RAY_ADDRESS, else a new one on loopback")
    placement: Literal["spread", "pack"] = param("spread", help="actors over the machines, or as close as possible")
    placement_timeout: float = param(60.0, gt=0, help="seconds to wait for the cluster to place the actors")
    step_timeout: float = param(600.0, gt=0, help="seconds to wait for a step before actors count as lost")
    heartbeat_timeout: float = param(
        20.0, gt=0, help="seconds without a sign of life before an actor counts as lost")
    transport: Literal["auto", "object_store"] = param(
        "auto", help="auto: small packets between actors on one machine through sockets; object_store: all through Ray")
    max_recoveries: int = param(100, ge=0, help="how often lost actors are replaced before the run fails")

    def __post_init__(self) -> None:
        if isinstance(self.nodes_per_actor, int) and self.nodes_per_actor < 1:
            raise ValueError(f"nodes_per_actor: {self.nodes_per_actor} is not allowed; must be auto or ≥ 1")
        if self.cpus_per_node is not None and self.cpus_per_node <= 0:
            raise ValueError(f"cpus_per_node: {self.cpus_per_node} is not allowed; must be > 0")


EngineSettings = LocalSettings | RaySettings
ENGINES: dict[str, type[LocalSettings] | type[RaySettings]] = {"ray": RaySettings, "local": LocalSettings}


def select_decisive(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a recorded `engine:` section that influence results.

    The others are the choice of whoever runs it here. Above all `address`: whoever serves a cluster executes code in
    the process that connects to it.
    """
    kind = ENGINES.get(str(section.get("name")))
    return {key: value for key, value in section.items() if kind is None or key not in kind.runtime_only}
