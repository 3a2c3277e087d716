"""One module selects the device, and the results do not depend on it."""

from typing import Any

import numpy as np
import pytest
from tests.faults.messages import advance

from dbo.algorithms.api import algorithms
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.block import Block
from dbo.platform.engine.device import Cpu, Torch, select_device
from dbo.platform.engine.shard_wrappers import pool_nodes
from dbo.platform.errors import RunError
from dbo.platform.network.topology import single_node
from dbo.platform.runs.runner import prepare

torch = pytest.importorskip("torch")


def start(name: str, device: Any, task: dict[str, Any], ids: list[list[int]]) -> list[Block]:
    experiment = Experiment(
        nodes=4, dtype="float64", task=task, algorithm={"name": name}, engine={"name": "local"},
    )
    parts, setup = experiment.parts, prepare(experiment)
    problem, network = setup.problem, setup.network
    if parts.algorithm.single_machine:
        problem, network, ids = pool_nodes(problem), single_node(), [[0]]
    return [Block(parts.algorithm, parts.config, problem, network, nodes, device=device) for nodes in ids]


@pytest.mark.parametrize("task", ["quadratic", "coefficient_tuning", "hyper_representation"])
@pytest.mark.parametrize("name", list(algorithms()))
def test_torch_equals_numpy(name: str, task: str) -> None:
    """Every algorithm on every dense task: tensors equal arrays (1e-7 in float64), with encoded packets."""
    small = {"name": task, "dim_x": 4, "dim_y": 8} if task == "quadratic" else {"name": task}
    ends = {}
    for device in (Cpu(), Torch("cpu")):
        blocks = start(name, device, small, [[0, 1], [2, 3]])
        advance(blocks, rounds=2)
        ends[type(device).__name__] = np.concatenate([block.rows("y") for block in blocks])
        assert np.isfinite(ends[type(device).__name__]).all()
    np.testing.assert_allclose(ends["Torch"], ends["Cpu"], rtol=1e-7, atol=1e-9)


def test_message_leaves_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each channel is fetched as a whole, however many rows of the block are encoded."""
    device = Torch("cpu")
    [block] = start("c2dfb", device, {"name": "quadratic"}, [[0, 1, 2]])
    fetched: list[tuple[int, ...]] = []
    original = device.fetch
    monkeypatch.setattr(device, "fetch", lambda array: (fetched.append(tuple(array.shape)), original(array))[1])
    block.begin(1)
    assert fetched == [(3, 20), (3, 20)]     # x and s, not their rows
    block.abandon()


def test_checkpoints_cross_devices() -> None:
    """A snapshot of one device consists of plain arrays and can be restored on the other."""
    [on_torch] = start("c2dfb", Torch("cpu"), {"name": "quadratic"}, [[0, 1, 2, 3]])
    [on_numpy] = start("c2dfb", Cpu(), {"name": "quadratic"}, [[0, 1, 2, 3]])
    advance([on_torch], rounds=2)
    flat = on_torch.snapshot()
    assert all(isinstance(array, np.ndarray) for array in flat.values())
    on_numpy.restore(flat)
    np.testing.assert_array_equal(on_numpy.rows("x"), on_torch.rows("x"))
    on_torch.restore(flat)
    advance([on_torch], rounds=1)


def test_cpu_is_selected_without_gpus_and_a_missing_gpu_is_reported() -> None:
    """gpus_per_node = 0: NumPy. More, and no GPU: a one-line error."""
    assert isinstance(select_device(0), Cpu)
    if not torch.cuda.is_available():
        with pytest.raises(RunError, match="torch finds no GPU"):
            select_device(0.5)


def test_deterministic_flags_are_set() -> None:
    """Tensors are used with deterministic kernels and full precision only."""
    Torch("cpu")
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.requires_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", list(algorithms()))
def test_gpu_equals_cpu(name: str) -> None:
    """On a real GPU: equal to the CPU to 1e-8 in float64, and bit-identical twice."""
    ends = []
    for device in (Cpu(), select_device(1), select_device(1)):
        blocks = start(name, device, {"name": "coefficient_tuning"}, [[0, 1], [2, 3]])
        advance(blocks, rounds=2)
        ends.append(np.concatenate([block.rows("y") for block in blocks]))
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-8, atol=1e-12)
    np.testing.assert_array_equal(ends[1], ends[2])
