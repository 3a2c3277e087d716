"""Build a problem, a network and an engine for the tests of algorithms."""

from collections.abc import Sequence
from typing import Any

import pytest

from dbo.algorithms.registry import Algorithm, algorithms
from dbo.platform.engine.arrangement import arrange
from dbo.platform.engine.local import LocalEngine
from dbo.platform.engine.shard_wrappers import pool_nodes
from dbo.platform.network.topology import TOPOLOGIES, Network, build_network
from dbo.tasks.api import Problem, Setup
from dbo.tasks.partitions import ByClass
from dbo.tasks.problems.quadratic import Quadratic, QuadraticProblem
from dbo.tasks.registry import DATASETS, TASKS

# Step sizes with which each algorithm is stable on the quadratic task (L_g = 1.1, strong convexity 0.2) and the three
# networks of the paper; an algorithm that is not here runs with its defaults.
QUADRATIC: dict[str, dict[str, Any]] = {
    "c2dfb": {"inner_steps": 4, "eta_in": 0.3, "eta_out": 0.1, "gamma_in": 0.3},
    "c2dfb_nc": {"inner_steps": 4, "eta_in": 0.2, "eta_out": 0.05, "gamma_in": 0.1},
    "c2dfb_lead": {"inner_steps": 4, "eta_in": 0.3, "eta_out": 0.1, "gamma_in": 0.3},
    "c2dfb_central": {"inner_steps": 4, "eta_in": 0.3, "eta_out": 0.1, "gamma_in": 0.3},
    "lean": {"inner_steps": 4, "eta_in": 0.3, "eta_out": 0.1},
    "madsbo": {"inner_steps": 4, "higp_steps": 20, "eta_x": 0.3, "eta_y": 0.4, "eta_z": 0.15},
    "madsbo_gt": {"inner_steps": 8, "higp_steps": 20, "eta_x": 0.3, "eta_y": 0.15, "eta_z": 0.15},
    "mdbo": {"eta": 0.3, "beta_x": 0.7, "beta_y": 0.7, "alpha_x": 2.0, "alpha_y": 2.0, "lipschitz": 1.2},
    "vrdbo": {"eta": 0.3, "beta_x": 0.7, "beta_y": 0.7, "lipschitz": 1.2},
    "dsgda_gt": {"eta_x": 0.03, "eta_y": 0.12, "eta_z": 0.12},
    "sldbo": {"eta_x": 0.05, "eta_y": 0.12, "eta_v": 0.12},
    "d_soba": {"eta_x": 0.2, "eta_y": 0.4, "eta_v": 0.4},
    "gossip_dsbo": {"eta_x": 0.2, "eta_y": 0.4, "lipschitz": 1.2},
    "fednest": {"local_steps": 3, "neumann_terms": 4, "lipschitz": 1.2, "eta_x": 0.05, "eta_y": 0.4},
    "simfbo": {"local_steps": 2, "local_x": 0.1, "local_y": 0.2, "local_v": 0.2, "eta_x": 0.2, "eta_y": 0.4,
               "eta_v": 0.4},
    "fedbioacc": {"local_steps": 2, "eta_x": 0.1, "eta_y": 0.2, "eta_v": 0.2},
    "aggitd": {"inner_steps": 4, "eta_x": 0.2, "eta_y": 0.4, "eta_z": 0.8},
    "ef_soba": {"eta_x": 0.05, "eta_y": 0.1, "eta_v": 0.1},
    "sparkle": {"eta_x": 0.2, "eta_y": 0.5, "eta_v": 0.5},
    "storm_pl": {"eta": 0.3, "beta_x": 0.1, "beta_y": 0.4, "beta_z": 0.4},
    "sun_dsbo": {"eta_x": 0.03, "eta_y": 0.12, "eta_theta": 0.12},
    "slam": {"inner_steps": 3, "eta_x": 0.3, "eta_y": 0.6, "lipschitz": 1.2},
    "f2ba": {"inner_steps": 10, "eta_in": 0.8},
    "f2sa": {"eta_z": 0.8, "eta_y": 0.8, "eta_x": 0.3},
    "stocbio": {"eta_y": 0.8, "eta_v": 0.8, "eta_x": 0.3},
    "soba": {"eta_x": 0.2, "eta_y": 0.5, "eta_v": 0.5},
    "bome": {"inner_steps": 5, "eta_in": 0.9, "eta_x": 0.1, "eta_y": 0.1},
}


class Lab:
    """Builds what a test needs; by default the small heterogeneous quadratic on a ring of six."""

    def algorithm(self, name: str) -> Algorithm:
        return algorithms()[name]

    def config(self, name: str, **changes: Any) -> Any:
        """Return the configuration with step sizes for the quadratic task, and these changes."""
        return self.algorithm(name).config(**{**QUADRATIC.get(name, {}), **changes})

    def quadratic(self, nodes: int = 6, dtype: str = "float64", **parameters: Any) -> QuadraticProblem:
        task = Quadratic(**{"dim_x": 3, "dim_y": 5, **parameters})
        return task.build(Setup(nodes=nodes, seed=0, dtype=dtype, partition=ByClass()))

    def learning(self, task: str, dataset: str, nodes: int = 5, **parameters: Any) -> Problem:
        """Return a task with data, partitioned by class."""
        data = DATASETS[dataset](**parameters)
        setup = Setup(nodes=nodes, seed=0, dtype="float64", partition=ByClass(h=0.6), data=data)
        return TASKS[task]().build(setup)

    def model(self, engine: LocalEngine, name: str) -> Any:
        """Return the mean of the nodes' rows, or the server's row."""
        rows = engine.rows(name)
        assert rows is not None
        return rows[-1] if engine.local_blocks[0].algorithm.network == "star" else rows.mean(0)

    def network(self, topology: str = "ring", nodes: int = 6) -> Network:
        return build_network(TOPOLOGIES[topology]().graph(nodes, 0))

    def engine(
        self,
        name: str,
        config: Any = None,
        problem: Any = None,
        topology: str | Network = "ring",
        blocks: Sequence[Sequence[int]] | None = None,
        rounds: int = 0,
        **options: Any,
    ) -> LocalEngine:
        """Return the engine after `rounds` rounds; a single-machine algorithm gets all nodes' data as one row.

        A method with a server gets one more node, and a block of its own for it if `blocks` do not name it.
        `options` are those of the engine: batches and schedules.
        """
        algorithm = self.algorithm(name)
        problem = self.quadratic() if problem is None else problem
        if algorithm.network == "single" and problem.nodes > 1:
            problem, topology, blocks = pool_nodes(problem), "ring", None
        net = self.network(topology, problem.nodes) if isinstance(topology, str) else topology
        if algorithm.network == "star":
            problem, net = arrange(algorithm, problem, net)
            if blocks is not None and not any(net.server in ids for ids in blocks):
                blocks = [*blocks, [net.nodes - 1]]
        config = self.config(name) if config is None else config
        made = LocalEngine(algorithm, config, problem, net, blocks or [range(net.nodes)], **options)
        for round_ in range(1, rounds + 1):
            made.advance(round_)
        return made


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()
