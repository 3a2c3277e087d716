"""One module selects the device, and the results do not depend on it."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from tests.faults.messages import advance
from tests.platform.engine.device_blocks import TASKS, start

from dbo.algorithms.api import algorithms
from dbo.algorithms.kernels import short
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine import device as placing
from dbo.platform.engine.block import Block
from dbo.platform.engine.device import Cpu, Torch, open_device, select_device
from dbo.platform.errors import RunError
from dbo.platform.runs.runner import run
from dbo.tasks.problems import backbone, coefficient_tuning

torch = pytest.importorskip("torch")


COMPRESSORS: dict[str, dict[str, Any]] = {
    "top_k": {"name": "top_k"}, "rand_k": {"name": "rand_k"}, "qsgd": {"name": "qsgd"}, "sign": {"name": "sign"},
}

WITH_TIES = {"digits in batches"}      # pixels that three images leave black: the signs of what rounding leaves
ONE_BLOCK = ((0, 1, 2, 3),)


@pytest.fixture(autouse=True)
def _settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one thread; give the wide text the shard of models with many entries, and layers their compiled products."""
    torch.set_num_threads(1)
    if "wide text" in request.node.name:
        monkeypatch.setattr(coefficient_tuning, "FUSED_MIN_ENTRIES", 1)
    if "layers in batches" in request.node.name:
        monkeypatch.setattr(backbone, "_FEWEST", 1)


def largest_difference(ours: list[Block], theirs: list[Block]) -> float:
    """Return the largest difference between two states, relative to the largest entry of its array; counters agree."""
    worst = 0.0
    for one, other in zip(ours, theirs, strict=True):
        a, b = one.snapshot(), other.snapshot()
        assert a.keys() == b.keys()
        for name, array in a.items():
            if array.dtype.kind == "f" and array.size:         # a part that is switched off has no columns
                assert np.isfinite(array).all()
                scale = max(float(np.max(np.abs(b[name]))), 1e-300)
                worst = max(worst, float(np.max(np.abs(array - b[name]))) / scale)
            else:
                np.testing.assert_array_equal(array, b[name], err_msg=name)
    return worst


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", list(algorithms()))
def test_torch_equals_numpy(name: str, task: str) -> None:
    """Every algorithm on every task, uncompressed: tensors equal arrays to 1e-10, with encoded packets between blocks.

    Oracle calls and bytes are the same.
    """
    runs = [start(name, task, device, compressor={"name": "identity"}) for device in (Torch("cpu"), Cpu())]
    for blocks in runs:
        advance(blocks, rounds=2)
    assert largest_difference(*runs) < 1e-10


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("task", sorted(TASKS.keys() - WITH_TIES))
@pytest.mark.parametrize("name", ["c2dfb", "c2dfb_nc"])
def test_compressed_rounds_equal_numpy(name: str, task: str, compressor: str) -> None:
    """Five rounds with every compressor: the same entries are selected and the same levels drawn."""
    runs = [start(name, task, device, compressor=COMPRESSORS[compressor]) for device in (Torch("cpu"), Cpu())]
    for blocks in runs:
        advance(blocks, rounds=5)
    assert largest_difference(*runs) < 1e-10


def test_comparison_detects_another_state() -> None:
    """Control: one round more is a difference."""
    runs = [start("c2dfb", "quadratic", device, ONE_BLOCK) for device in (Torch("cpu"), Cpu())]
    for rounds, blocks in enumerate(runs, start=2):
        advance(blocks, rounds=rounds)
    for blocks in runs:
        blocks[0].ledger.restore(runs[0][0].ledger.export())
        blocks[0].shard.calls[:] = 0
        blocks[0].state = replace(blocks[0].state, t=0 * blocks[0].state.t)
    assert largest_difference(*runs) > 1e-3


def test_checkpoints_cross_devices() -> None:
    """A snapshot of one device consists of plain arrays and can be restored on the other."""
    [on_torch] = start("c2dfb", "quadratic", Torch("cpu"), ONE_BLOCK)
    [on_numpy] = start("c2dfb", "quadratic", Cpu(), ONE_BLOCK)
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
    assert isinstance(open_device("torch_cpu"), Torch)
    if not torch.cuda.is_available():
        with pytest.raises(RunError, match="torch finds no GPU"):
            select_device(0.5)


def test_deterministic_flags_are_set() -> None:
    """Tensors are used with deterministic kernels and full precision only."""
    Torch("cpu")
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("name", ["c2dfb", "mdbo", "bome"])
def test_local_engine_runs_on_a_torch_device(name: str, tmp_path: Path) -> None:
    """`engine.device: torch_cpu` gives the metrics of NumPy, and is another run; an extended run has the same bits."""
    def run_on(device: str, rounds: int, folder: str, **options: Any) -> Any:
        return run(Experiment(
            nodes=4, dtype="float64", rounds=rounds, **TASKS["quadratic"], algorithm={"name": name},
            checkpoint_every=1, engine={"name": "local", "device": device},
        ), tmp_path / folder, **options)

    ours, theirs = run_on("cpu", 3, "cpu"), run_on("torch_cpu", 3, "torch")
    assert ours.experiment.run_key != theirs.experiment.run_key
    np.testing.assert_allclose(theirs.state["x"], ours.state["x"], rtol=1e-10)
    np.testing.assert_allclose(theirs.history["test_loss"], ours.history["test_loss"], rtol=1e-10)
    assert isinstance(theirs.state["x"], np.ndarray)
    run_on("torch_cpu", 2, "half")
    longer = run_on("torch_cpu", 3, "longer", start_from=tmp_path / "half")
    assert longer.state["x"].tobytes() == theirs.state["x"].tobytes()


@pytest.mark.parametrize("variable", [None, "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_memory_of_large_arrays_is_reused(variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one arena, without mapping and without trimming, unless the user has configured malloc."""
    settings: list[tuple[int, int]] = []

    class Library:
        mallopt = staticmethod(lambda name, value: settings.append((name, value)))

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(placing.ctypes, "CDLL", lambda name: Library)
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    placing._keep_memory.__wrapped__()
    mmap_max, arena_max, trim_threshold = -4, -8, -1
    assert settings == ([] if variable else [(mmap_max, 0), (arena_max, 1), (trim_threshold, -1)])


def test_a_run_on_the_cpu_does_not_import_torch(tmp_path: Path) -> None:
    """Importing torch takes seconds: a compressed run on NumPy arrays does without it; `torch_cpu` is the control."""
    code = (
        "import sys\n"
        "from dbo.platform.config.experiment import Experiment\n"
        "from dbo.platform.runs.runner import run\n"
        "engine = {'name': 'local', 'device': sys.argv[1]}\n"
        "run(Experiment(task={'name': 'quadratic'}, rounds=1, engine=engine), sys.argv[2])\n"
        "print('torch' in sys.modules)"
    )
    for device, expected in (("cpu", "False"), ("torch_cpu", "True")):
        done = subprocess.run(
            [sys.executable, "-c", code, device, str(tmp_path / device)],
            capture_output=True, text=True, timeout=300, check=True,
        )
        assert done.stdout.split() == [expected]


@pytest.mark.requires_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_compressed_rounds_on_a_gpu_equal_numpy(compressor: str) -> None:
    """On a real GPU: five rounds with every compressor, packets included."""
    runs = [
        start("c2dfb", "quadratic", device, compressor=COMPRESSORS[compressor])
        for device in (select_device(1), Cpu())
    ]
    for blocks in runs:
        advance(blocks, rounds=5)
    assert largest_difference(*runs) < 1e-8


@pytest.mark.requires_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", list(algorithms()))
def test_a_gpu_does_not_make_the_host_wait(name: str, task: str) -> None:
    """On a real GPU: a round of one block, uncompressed, runs while torch refuses every synchronisation."""
    blocks = start(name, task, select_device(1), ONE_BLOCK, compressor={"name": "identity"})
    advance(blocks, rounds=1)            # uploads the weights
    torch.cuda.set_sync_debug_mode("error")
    try:
        advance(blocks, rounds=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.requires_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", list(algorithms()))
def test_gpu_equals_cpu(name: str, task: str) -> None:
    """On a real GPU: equal to the CPU to 1e-8 in float64, and bit-identical twice."""
    ends = []
    for device in (Cpu(), select_device(1), select_device(1)):
        blocks = start(name, task, device)
        advance(blocks, rounds=2)
        ends.append(np.concatenate([block.rows("y") for block in blocks]))
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-8, atol=1e-12)
    np.testing.assert_array_equal(ends[1], ends[2])


def test_products_have_the_same_bits_in_parts_and_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """W @ rows in parts of the columns, and with the compiled loops, has the bits of the whole product."""
    rng = np.random.default_rng(0)
    weights = sparse.random_array((50, 50), density=0.2, format="csr", rng=rng, dtype=np.float32)
    rows = rng.standard_normal((50, 91)).astype(np.float32)
    whole = weights @ rows
    assert short.short_loops(rows) is short.imported_loops(rows) is not None
    np.testing.assert_array_equal(placing._multiply(weights, rows), whole)
    monkeypatch.setattr(short, "imported_loops", lambda rows: None)
    np.testing.assert_array_equal(placing._multiply(weights, rows), whole)
    monkeypatch.setattr(placing, "_CACHED_BYTES", 1)
    np.testing.assert_array_equal(placing._multiply(weights, rows), whole)
