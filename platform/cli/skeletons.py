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
    directions = {"test_accuracy": "max", "test_loss": "min"}       # metrics, and which values are better

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

FILES = {"algorithm": (ALGORITHM, ALGORITHM_TEST), "task": (TASK, TASK_TEST)}
