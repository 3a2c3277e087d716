"""The tasks on which devices are compared, and blocks of nodes that run them."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from dbo.algorithms.api import algorithms
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.arrangement import arrange
from dbo.platform.engine.block import Block
from dbo.platform.engine.shard_wrappers import pool_nodes
from dbo.platform.network.topology import single_node
from dbo.platform.runs.runner import prepare

NET = {"task": {"name": "device_net"}, "plugins": [str(Path(__file__).with_name("device_net.py"))]}
TEXT = {"name": "coefficient_tuning", "dataset": "synthetic_text", "documents": 100, "features": 50, "classes": 4}
DIGITS = {"task": {"name": "coefficient_tuning"}}      # with fewer images, rare pixels tie in the selection
LAYERS = {"task": {"name": "hyper_representation", "test_fraction": 0.9, "hidden": [8, 8]}}
CLEANING = {"task": {"name": "hyper_cleaning", "test_fraction": 0.9, "random_features": 20, "components": 8}}
POLICY = {"task": {"name": "policy_evaluation", "states": 12, "dim_x": 3, "transitions": 4}}
LOGISTIC = {
    "task": {"name": "logistic_synthetic", "dim": 6, "train_samples": 20, "val_samples": 20, "test_samples": 20},
    "partition": "iid",
}
BATCHES = {"batch_size": 3}
TASKS: dict[str, dict[str, Any]] = {        # keys of an experiment
    "quadratic": {"task": {"name": "quadratic", "dim_x": 4, "dim_y": 8}},
    "digits": DIGITS,
    "digits in batches": {**DIGITS, **BATCHES},
    "text": {"task": TEXT},
    "wide text": {"task": TEXT},            # the shard of models with many entries: `FUSED_MIN_ENTRIES` is set to 1
    "wide text in batches": {"task": TEXT, **BATCHES},
    "layers": LAYERS,
    "layers in batches": {**LAYERS, **BATCHES, "batch_per": "round"},      # compiled products: `_FEWEST` is set to 1
    "cleaning": CLEANING,
    "cleaning in batches": {**CLEANING, **BATCHES},
    "policy": POLICY,
    "logistic": LOGISTIC,
    "torch": NET,
    "torch in batches": {**NET, **BATCHES},
}
FEW = {"inner_steps": 2, "higp_steps": 2, "neumann_terms": 3}      # short loops, for algorithms that have them

# Steps with which the few documents of the text do not diverge.
STABLE: dict[str, dict[str, Any]] = {
    "mdbo": {"beta_x": 0.5, "beta_y": 0.5}, "c2dfb_nc": {"eta_in": 0.1, "eta_out": 0.1},
}


def start(
    name: str, task: str, device: Any, ids: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3)), **parameters: Any
) -> list[Block]:
    """Return blocks of four nodes; single-machine algorithms have one block. Unknown parameters are left out."""
    known = {field.name for field in fields(algorithms()[name].config)}
    chosen = {key: value for key, value in {**FEW, **STABLE.get(name, {}), **parameters}.items() if key in known}
    experiment = Experiment(
        nodes=4, dtype="float64", algorithm={"name": name, **chosen}, engine={"name": "local"}, **TASKS[task])
    parts, setup = experiment.parts, prepare(experiment)
    problem, network, blocks = setup.problem, setup.network, [list(nodes) for nodes in ids]
    if parts.algorithm.network == "single":
        problem, network, blocks = pool_nodes(problem), single_node(), [[0]]
    elif parts.algorithm.network == "star":
        problem, network = arrange(parts.algorithm, problem, network)
        server = network.nodes - 1
        blocks = [*blocks, [server]] if len(blocks) > 1 else [[*blocks[0], server]]
    return [
        Block(parts.algorithm, parts.config, problem, network, nodes, device=device, batches=parts.batches)
        for nodes in blocks
    ]
