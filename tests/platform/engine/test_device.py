"""One place chooses the device, and the numbers do not depend on it."""

from typing import Any

import numpy as np
import pytest

from dbo.algorithms.registry import algorithms
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.block import Host
from dbo.platform.engine.device import Cpu, Torch, choose
from dbo.platform.engine.shard_wrappers import pooled
from dbo.platform.errors import RunError
from dbo.platform.network.topology import single_node
from dbo.platform.runs.runner import prepare

torch = pytest.importorskip("torch")


def hosts(name: str, device: Any, task: dict[str, Any], blocks: list[list[int]]) -> list[Host]:
    experiment = Experiment(
        nodes=4, dtype="float64", task=task, algorithm={"name": name}, engine={"name": "local"},
    )
    parts, made = experiment.parts, prepare(experiment)
    problem, network = made.problem, made.network
    if parts.algorithm.single_machine:
        problem, network, blocks = pooled(problem), single_node(), [[0]]
    return [Host(parts.algorithm, parts.config, problem, network, ids, device=device) for ids in blocks]


def drive(blocks: list[Host], rounds: int) -> None:
    for round_ in range(1, rounds + 1):
        said = [host.begin(round_) for host in blocks]
        while said[0] is not None:
            posted: dict[int, bytes] = {}
            for packets in said:
                posted |= packets or {}
            said = [host.step(posted) for host in blocks]


@pytest.mark.parametrize("task", ["quadratic", "coefficient_tuning", "hyper_representation"])
@pytest.mark.parametrize("name", list(algorithms()))
def test_torch_equals_numpy(name: str, task: str) -> None:
    """Every algorithm on every dense task: tensors give what arrays give (1e-7 in float64), over real packets."""
    small = {"name": task, "dim_x": 4, "dim_y": 8} if task == "quadratic" else {"name": task}
    ends = {}
    for device in (Cpu(), Torch("cpu")):
        blocks = hosts(name, device, small, [[0, 1], [2, 3]])
        drive(blocks, rounds=2)
        ends[type(device).__name__] = np.concatenate([host.rows("y") for host in blocks])
        assert np.isfinite(ends[type(device).__name__]).all()
    np.testing.assert_allclose(ends["Torch"], ends["Cpu"], rtol=1e-7, atol=1e-9)


def test_a_message_leaves_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each channel of a packet is fetched as a whole, however many rows of the block are encoded from it."""
    device = Torch("cpu")
    [host] = hosts("c2dfb", device, {"name": "quadratic"}, [[0, 1, 2]])
    fetched: list[tuple[int, ...]] = []
    original = device.fetch
    monkeypatch.setattr(device, "fetch", lambda array: (fetched.append(tuple(array.shape)), original(array))[1])
    host.begin(1)
    assert fetched == [(3, 20), (3, 20)]     # x and s, not their rows
    host.abandon()


def test_checkpoints_cross_devices() -> None:
    """A snapshot taken on one device is plain arrays and can be restored on the other."""
    [ours] = hosts("c2dfb", Torch("cpu"), {"name": "quadratic"}, [[0, 1, 2, 3]])
    [theirs] = hosts("c2dfb", Cpu(), {"name": "quadratic"}, [[0, 1, 2, 3]])
    drive([ours], rounds=2)
    flat = ours.snapshot()
    assert all(isinstance(array, np.ndarray) for array in flat.values())
    theirs.restore(flat)
    np.testing.assert_array_equal(theirs.rows("x"), ours.rows("x"))
    ours.restore(flat)
    drive([ours], rounds=1)


def test_the_cpu_is_chosen_without_gpus_and_a_missing_gpu_is_told() -> None:
    """gpus_per_node = 0: NumPy. More, and none to be seen: one clear line."""
    assert isinstance(choose(0), Cpu)
    if not torch.cuda.is_available():
        with pytest.raises(RunError, match="torch sees no GPU"):
            choose(0.5)


def test_deterministic_flags_are_set() -> None:
    """Tensors are only used with deterministic kernels and without reduced precision."""
    Torch("cpu")
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.requires_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", list(algorithms()))
def test_gpu_equals_cpu(name: str) -> None:
    """On a real GPU: the CPU's numbers to 1e-8 in float64, and the same bits twice."""
    ends = []
    for device in (Cpu(), choose(1), choose(1)):
        blocks = hosts(name, device, {"name": "coefficient_tuning"}, [[0, 1], [2, 3]])
        drive(blocks, rounds=2)
        ends.append(np.concatenate([host.rows("y") for host in blocks]))
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-8, atol=1e-12)
    np.testing.assert_array_equal(ends[1], ends[2])
