"""Hold the text of the files that `dbo new` writes: a plugin that works, and its test."""

ALGORITHM = '''"""NAME: describe the method here, with its reference, and what it sends per round.

    dbo run plugins=NAME.py algorithm=NAME task=quadratic rounds=200 engine=local
    dbo verify --plugin NAME.py --algorithm NAME
"""

from dataclasses import dataclass

import dbo


@dataclass(frozen=True, kw_only=True)
class Config:                   # keys of `algorithm:` in an experiment; `dbo list NAME plugins=NAME.py` shows them
    lam: float = dbo.param(10.0, gt=0, help="penalty λ")
    step: float = dbo.param(0.1, gt=0, schedule=True, help="step size of x, y and z")


@dataclass(frozen=True)
class State:                    # everything that outlives a round: arrays with a row per node
    x: dbo.Array
    y: dbo.Array                # tracks the minimiser of f / λ + g
    z: dbo.Array                # tracks the minimiser of g
    direction: dbo.Array        # of the next step of x; the norm of its mean is reported


def init(shard: dbo.Shard, cfg: Config) -> State:
    """Return the state before the first round: all nodes have the same x and y."""
    return State(x=shard.x0, y=shard.y0, z=shard.y0, direction=shard.f_x(shard.x0, shard.y0))


@dbo.algorithm("NAME", config=Config, state=State, init=init, penalty=lambda cfg: cfg.lam)
async def NAME(st: State, shard: dbo.Shard, cfg: Config) -> State:
    """NAME: gossip and gradient steps on f + λ (g − min g); one packet per round."""
    y = st.y - cfg.step * (shard.f_y(st.x, st.y) / cfg.lam + shard.g_y(st.x, st.y))
    z = st.z - cfg.step * shard.g_y(st.x, st.z)
    x, y, z = await dbo.mix(x=st.x - cfg.step * st.direction, y=y, z=z)     # one packet; returns Σ_j w_ij (·)_j
    direction = shard.f_x(x, y) + cfg.lam * (shard.g_x(x, y) - shard.g_x(x, z))
    return State(x=x, y=y, z=z, direction=direction)
'''

ALGORITHM_TEST = '''"""NAME reaches the neighbourhood of the solution, and keeps the contracts of an algorithm."""

import subprocess
import sys
from pathlib import Path

import dbo

FILE = Path(__file__).with_name("NAME.py")


def test_it_passes_verify() -> None:
    """Determinism, resume, packing and the fixed point, as `dbo verify` checks them."""
    command = ["verify", "--plugin", str(FILE), "--algorithm", "NAME"]
    done = subprocess.run([sys.executable, "-m", "dbo.platform.cli", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_approaches_the_solution(tmp_path: Path) -> None:
    """On a quadratic problem, whose solution is known."""
    result = dbo.run(plugins=[str(FILE)], algorithm="NAME", task="quadratic", nodes=4, rounds=200, engine="local",
                     out=tmp_path / "run")
    error = result.history["solution_error"]
    assert error.iloc[-1] < 0.5 * error.iloc[0]
'''

TASK = '''"""NAME: describe the problem here: what x and y are, and what both levels minimise.

    dbo run plugins=NAME.py task=NAME engine=local rounds=20 algorithm.eta_in=0.1 algorithm.eta_out=0.1
    dbo verify --plugin NAME.py --task NAME
"""

import torch
from torch.nn.functional import cross_entropy

import dbo


@dbo.task("NAME")
class Task(dbo.TorchTask):
    """NAME: linear classifier (lower level) whose per-feature regularisation is tuned (upper level)."""

    strongly_convex = True      # g in y
    # Other metrics than test_accuracy and test_loss: directions = {"my_metric": "min"}, which values are better.

    samples: int = dbo.param(600, ge=30, help="samples in all")
    features: int = dbo.param(8, ge=1, help="entries of a sample")

    def data(self, seed):
        """Return train (lower level), val (upper level) and test: replace this by your own arrays or data sets."""
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(self.samples, self.features, generator=generator)
        truth = torch.randn(self.features, 3, generator=generator)
        labels = (inputs @ truth).argmax(1)
        return dbo.Split(*((inputs[part::3], labels[part::3]) for part in range(3)), classes=3)

    def init(self, generator):
        """Return the start of x and of y: tensors, modules, or dictionaries of them."""
        return {"log_weight": torch.full((self.features,), -3.0)}, {"head": torch.zeros(self.features, 3)}

    def lower(self, x, y, batch):
        """Return g_i, a scalar."""
        ridge = (x["log_weight"].exp()[:, None] * y["head"].square()).sum()
        return cross_entropy(batch.inputs @ y["head"], batch.labels) + ridge

    def upper(self, x, y, batch):
        """Return f_i, a scalar."""
        return cross_entropy(batch.inputs @ y["head"], batch.labels)

    def metrics(self, x, y, test):
        """Return the metrics of one model."""
        scores = test.inputs @ y["head"]
        return {"test_accuracy": (scores.argmax(1) == test.labels).float().mean(),
                "test_loss": cross_entropy(scores, test.labels)}
'''

TASK_TEST = '''"""NAME has correct derivatives, keeps the contracts of a task, and can be learned."""

import subprocess
import sys
from pathlib import Path

import dbo

FILE = Path(__file__).with_name("NAME.py")


def test_it_passes_verify() -> None:
    """Derivatives, batches, packing and shipping, as `dbo verify` checks them."""
    command = ["verify", "--plugin", str(FILE), "--task", "NAME"]
    done = subprocess.run([sys.executable, "-m", "dbo.platform.cli", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_can_be_learned(tmp_path: Path) -> None:
    """A few rounds lower the upper loss."""
    steps = {"name": "c2dfb", "eta_in": 0.1, "eta_out": 0.1}
    result = dbo.run(plugins=[str(FILE)], task="NAME", algorithm=steps, nodes=4, rounds=10, engine="local",
                     out=tmp_path / "run")
    loss = result.history["upper_loss"]
    assert loss.iloc[-1] < 0.9 * loss.iloc[0]
'''

DATASET = '''"""NAME: describe the data here: what a sample is, where it comes from, how it is split.

    dbo list plugins=NAME.py NAME
    dbo run plugins=NAME.py task=coefficient_tuning task.dataset=NAME engine=local rounds=20
"""

import numpy as np

import dbo


@dbo.dataset("NAME")
class DataSet:
    """Two rings of points with noise, one per class."""

    samples: int = dbo.param(600, ge=30, help="samples in all")
    noise: float = dbo.param(0.2, ge=0, help="standard deviation of the radius")

    def load(self, seed, data_dir):
        """Return train (lower level), val (upper level) and test; `data_dir` is the experiment's, or None."""
        rng = np.random.default_rng(seed)
        labels = rng.permutation(np.arange(self.samples) % 2)
        radius = 1 + labels + self.noise * rng.standard_normal(self.samples)
        angle = 2 * np.pi * rng.random(self.samples)
        features = np.stack([np.cos(angle), np.sin(angle), radius**2 / 4, np.ones_like(radius)], axis=1)
        train, val, test = (dbo.Part(features[part::3], labels[part::3]) for part in range(3))
        return dbo.Split(train, val, test, classes=2)
'''

DATASET_TEST = '''"""NAME is the same in every process, and can be learned."""

from pathlib import Path
from typing import Any

import dbo

FILE = Path(__file__).with_name("NAME.py")
TASK = {"name": "coefficient_tuning", "dataset": "NAME"}


def run(out: Path, rounds: int) -> Any:
    """Run a small classifier on the data."""
    return dbo.run(plugins=[str(FILE)], task=TASK, nodes=4, rounds=rounds, engine="local", out=out)


def test_it_depends_on_the_seed_alone(tmp_path: Path) -> None:
    """Two runs record the same hash of the data."""
    first, second = (run(tmp_path / name, 1) for name in ("a", "b"))
    assert first.summary["problem"]["data_sha256"] == second.summary["problem"]["data_sha256"]


def test_it_can_be_learned(tmp_path: Path) -> None:
    """Better than chance."""
    assert run(tmp_path / "run", 30).history["test_accuracy"].iloc[-1] > 0.8
'''

PARTITION = '''"""NAME: describe here which node gets which samples.

    dbo list plugins=NAME.py NAME
    dbo run plugins=NAME.py partition=NAME partition.skew=2 engine=local
"""

import numpy as np

import dbo


@dbo.partition("NAME")
class Partition:
    """Random samples in unequal numbers: node i gets a share in proportion to (i + 1) ** skew."""

    skew: float = dbo.param(1.0, ge=0, le=10, help="0: equal shares")

    def assign(self, labels, nodes, rng):
        """Return the sample numbers of each node: every sample to one node, at least one to every node."""
        if len(labels) < nodes:
            raise ValueError(f"nodes: {nodes} nodes cannot share {len(labels)} samples")
        share = np.arange(1.0, nodes + 1) ** self.skew
        sizes = 1 + np.floor((len(labels) - nodes) * share / share.sum()).astype(int)
        return np.split(rng.permutation(len(labels)), np.cumsum(sizes)[:-1])      # the last node gets the rest
'''

PARTITION_TEST = '''"""NAME assigns every sample once, and a run accepts it."""

from pathlib import Path

import dbo

FILE = Path(__file__).with_name("NAME.py")


def test_a_run_accepts_it(tmp_path: Path) -> None:
    """dbo refuses a partition that loses a sample, repeats one or leaves a node empty."""
    result = dbo.run(plugins=[str(FILE)], partition={"name": "NAME", "skew": 2.0}, nodes=4, rounds=1, engine="local",
                     out=tmp_path / "run")
    sizes = result.summary["problem"]["train_sizes"]
    assert sorted(sizes) == sizes
    assert sizes[0] < sizes[-1]
'''

TOPOLOGY = '''"""NAME: describe the graph here.

    dbo list plugins=NAME.py NAME
    dbo run plugins=NAME.py topology=NAME topology.every=2 task=quadratic rounds=100 engine=local
"""

import networkx as nx

import dbo


@dbo.topology("NAME")
class Topology:
    """A ring with a hub: node 0 is a neighbour of every `every`-th node."""

    every: int = dbo.param(1, ge=1, help="1: node 0 is a neighbour of all nodes")

    def graph(self, nodes, seed):
        """Return a connected graph with the nodes 0 … nodes − 1; a random one draws from `seed`."""
        if nodes < 3:
            raise ValueError(f"nodes: {nodes} is not allowed; NAME needs at least 3")
        graph = nx.cycle_graph(nodes)
        graph.add_edges_from((0, node) for node in range(self.every, nodes, self.every))
        return graph
'''

TOPOLOGY_TEST = '''"""NAME carries a run, and mixes faster than a large ring."""

from pathlib import Path

import dbo

FILE = Path(__file__).with_name("NAME.py")


def test_it_mixes_faster_than_a_large_ring(tmp_path: Path) -> None:
    """The hub shortens paths: the spectral gap is larger. On few nodes it is not, the hub's weights are too small."""
    gaps = [
        dbo.run(plugins=[str(FILE)], topology=name, task="quadratic", nodes=40, rounds=1, engine="local",
                out=tmp_path / name).summary["network"]["spectral_gap"]
        for name in ("NAME", "ring")
    ]
    assert gaps[0] > gaps[1]
'''

COMPRESSOR = '''"""NAME: describe here what a message keeps.

    dbo list plugins=NAME.py NAME
    dbo run plugins=NAME.py algorithm.compressor=NAME algorithm.gamma_in=auto task=quadratic engine=local
"""

import numpy as np

import dbo


@dbo.compressor("NAME")
class Compressor:
    """Keeps a random run of neighbouring entries, unscaled; the row counts as a circle."""

    ratio: float = dbo.param(0.2, gt=0, le=1, help="share of the entries that is kept; at least one is")

    def count(self, dim):
        return max(1, int(self.ratio * dim))

    def __call__(self, rows, key, channel):
        """Return Q of every row of `rows`, (nodes, dim): an array, or a tensor on a GPU."""
        dim, kept = rows.shape[1], self.count(rows.shape[1])
        values = rows + 0.0                                                  # a copy
        for row, generator in zip(values, key.generators(f"NAME {channel}"), strict=True):
            dropped = (generator.integers(dim) + np.arange(kept, dim)) % dim
            row[dropped] = 0.0
        return dbo.Message(values, form="sparse", kept=kept)                 # zeros are not sent

    def contraction(self, dim):
        """Return δ in E‖Q(v) − v‖² ≤ (1 − δ) ‖v‖²: every entry is kept with probability k/d."""
        return self.count(dim) / dim
'''

COMPRESSOR_TEST = '''"""NAME is contractive as it declares, and a run accepts it."""

from pathlib import Path

import numpy as np

import dbo

FILE = Path(__file__).with_name("NAME.py")


def test_it_contracts(tmp_path: Path) -> None:
    """E‖Q(v) − v‖² ≤ (1 − δ) ‖v‖², over many keys."""
    algorithm = {"name": "c2dfb", "compressor": {"name": "NAME"}}
    compressor = dbo.Experiment(plugins=[str(FILE)], algorithm=algorithm).parts.config.compressor
    rows = np.random.default_rng(0).standard_normal((2, 50))
    errors = []
    for round_ in range(500):
        sent = compressor(rows, dbo.Key(seed=0, ids=np.arange(2), round=round_), "y").values
        errors.append(((sent - rows) ** 2).sum() / (rows**2).sum())
    assert np.mean(errors) <= 1.05 * (1 - compressor.contraction(50))


def test_a_run_sends_fewer_bytes(tmp_path: Path) -> None:
    """Than without compression, and approaches the solution; `gamma_in: auto` depends on the contraction."""
    plain, compressed = (
        dbo.run(plugins=[str(FILE)], algorithm={"name": "c2dfb", "compressor": name, "gamma_in": "auto"},
                task="quadratic", nodes=4, rounds=50, engine="local", out=tmp_path / name)
        for name in ("identity", "NAME")
    )
    assert compressed.history["comm_mb"].iloc[-1] < 0.8 * plain.history["comm_mb"].iloc[-1]
    assert compressed.history["solution_error"].iloc[-1] < 0.5 * compressed.history["solution_error"].iloc[0]
'''

FILES = {
    "algorithm": (ALGORITHM, ALGORITHM_TEST), "task": (TASK, TASK_TEST), "dataset": (DATASET, DATASET_TEST),
    "partition": (PARTITION, PARTITION_TEST), "topology": (TOPOLOGY, TOPOLOGY_TEST),
    "compressor": (COMPRESSOR, COMPRESSOR_TEST),
}
