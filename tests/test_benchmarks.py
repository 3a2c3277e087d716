"""Benchmarks run and print their ratios and targets. No test judges the speed itself."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dbo.algorithms.kernels.compiled import find_processor
from dbo.algorithms.kernels.selection import usable_forms

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
JUDGED = r": \d+\.\d\d× \(of medians \d+\.\d\d×\), target at (most|least) [\d.]+×: (met|MISSED)"


def run_benchmark(script: str, *options: str) -> str:
    """Return the output of a quick run of a benchmark."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--quick", *options],
        capture_output=True, text=True, timeout=500, check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_round_benchmark_runs() -> None:
    """A round in process is compared with bare NumPy: first the trajectory, then the time."""
    output = run_benchmark("round.py")
    assert "the same x, y and z after" in output
    assert re.search("engine : bare NumPy" + JUDGED, output)


def test_nodes_benchmark_runs() -> None:
    """With many nodes in process, the ratio of times and the memory of one more node are printed."""
    output = run_benchmark("engine.py", "--part", "nodes")
    assert re.search("100 nodes : 20 nodes" + JUDGED, output)
    assert re.search(r"-?\d+ KiB per node more", output)


def test_scale_benchmark_runs() -> None:
    """Many nodes: a node's share of a round, evaluations, sizes of files, times of checkpoints and of readers."""
    output = run_benchmark("scale.py")
    for ratio in ("a node's share, 1,000 : 100 nodes", "an evaluation of all nodes : a round"):
        assert re.search(re.escape(ratio) + JUDGED, output)
    for what in ("load the checkpoint", "save a checkpoint"):
        assert re.search(what + r" +\d+\.\d\d s, +\d+\.\d\d s of the processor", output)
    assert re.search(r"a line of nodes.jsonl +\d+\.\d kB", output)
    assert re.search(r"report +\d+\.\d\d s", output)


def test_kernels_benchmark_runs() -> None:
    """Top-k and its encoding are compared with torch, with a pass over memory and with the entropy bound."""
    output = run_benchmark("kernels.py")
    for form in usable_forms(find_processor()[1]):
        assert re.search(re.escape(f"torch.topk + gather : select + encode, {form}") + JUDGED, output)
        assert re.search(re.escape(f"select + encode, {form} : in-place pass") + JUDGED, output)
    for kind in ("random", "clustered"):
        for bits in (32, 4, 8, 16):
            assert f"encode + decode beyond a bitmap, 3 %, {kind}: {bits} bits : in-place pass" in output
        for ratio in (0.2, 0.05, 0.01, 0.001):
            coders = r"log2 C\(d, k\).*entropy of gaps.*Rice.*Exp-Golomb.*Elias-Fano.*bitmap.*indices 32"
            assert re.search(f"{kind}, {ratio:g}: {coders}", output)
    found = re.findall(r"encoded bytes : entropy bound, [\d.]+, \d+ bits: \d\.\d+×, target at most 1\.03×: met", output)
    assert len(found) == 4 * 5                  # ratios and numbers of bits


def test_torch_task_benchmark_runs() -> None:
    """Oracles in torch are compared with closed forms, rounds on batches with rounds on all samples."""
    output = run_benchmark("torch_task.py")
    assert len(re.findall("TorchTask : closed form" + JUDGED, output)) == 6
    assert re.search("all samples : a batch per round" + JUDGED, output)


def test_replay_benchmark_runs() -> None:
    """The clock of many nodes is compared with that of few."""
    output = run_benchmark("replay.py")
    assert re.search("1000 nodes : 100 nodes" + JUDGED, output)


def test_startup_benchmark_runs() -> None:
    """The time to the first round is compared with that of importing common libraries."""
    output = run_benchmark("startup.py")
    for start in ("dbo run", "dbo.run"):
        assert re.search(re.escape(f"{start} : the imports") + JUDGED, output)


@pytest.mark.slow
def test_newsgroups_benchmark_runs() -> None:
    """A round is compared with a naive one of the same result and with an uncompressed one; memory is measured."""
    output = run_benchmark("newsgroups.py")
    assert "the same y after a round" in output
    assert re.search("naive torch : top-k 20 %" + JUDGED, output)
    assert re.search("top-k 20 % : uncompressed" + JUDGED, output)
    assert re.search(r"bytes of a message : entropy bound: 1\.\d+×, target at most 1\.05×: met", output)
    assert re.search(r"engine local, without the MLflow process: \d\.\d+ GB, target at most 1\.9 GB: met", output)


NEEDS_GIT = pytest.mark.skipif(not (BENCHMARKS.parent / ".git").exists(), reason="no git repository")


@NEEDS_GIT
@pytest.mark.slow
def test_newsgroups_benchmark_compares_every_method_with_another_commit() -> None:
    """A ratio of processor times per method."""
    chosen = ("--algorithm", "all", "--methods", "d_soba,f2ba")
    output = run_benchmark("newsgroups.py", "--part", "versions", "--against", "HEAD", *chosen)
    for name in ("d_soba", "f2ba"):
        assert re.search(f"HEAD : this code, {name}, processor time" + JUDGED, output)


@NEEDS_GIT
@pytest.mark.slow
def test_newsgroups_benchmark_compares_memory_with_another_commit() -> None:
    """Peaks of all processes, with ψ and without, as ratios to that of the other commit."""
    output = run_benchmark("newsgroups.py", "--part", "memory", "--against", "HEAD")
    assert re.search(r"all processes: HEAD \d\.\d+ GB, this code \d\.\d+ GB, without ψ \d\.\d+ GB", output)
    for which in ("with ψ", "without ψ"):
        what = f"this code {which} : HEAD, peak memory of a run, engine local, all processes"
        assert re.search(rf"{what}: \d\.\d+×, target at most 1×: (met|MISSED)", output)


@pytest.mark.ray
@pytest.mark.slow
def test_engine_benchmark_runs() -> None:
    """Ray is compared with the local engine and, for small messages, with gloo, which computes the same result."""
    output = run_benchmark("engine.py", "--part", "small", "--part", "large")
    assert len(re.findall("Ray : in process" + JUDGED, output)) == 2
    assert "gloo and in process: the same x after" in output
    assert re.search("gloo, message by message : Ray" + JUDGED, output)


def test_the_cost_of_flooding_the_data_is_printed() -> None:
    """A row per classification task without files: samples, non-zeros, bytes between those of values and dense rows."""
    output = run_benchmark("ceilings.py", "--flooding")
    rows = {cells[0]: [int(cell.replace(",", "")) for cell in cells[1:]] for line in output.splitlines()[2:]
            if (cells := [cell.strip() for cell in line.strip("| ").split("|")])}
    assert rows.keys() == {"hyper_cleaning/digits", "coefficient_tuning/digits", "hyper_representation/digits"}
    samples, nonzeros, floats, single, dense = rows["coefficient_tuning/digits"]
    assert samples == 1438
    assert 4 * nonzeros + 3 * samples < floats < samples * (4 * 64 + 3)
    assert nonzeros + 3 * samples < single < samples * (64 + 3)
    assert dense == 4 * (64 + 2 * 640)
    assert rows["hyper_cleaning/digits"][2] <= samples * (4 * 61 + 3)      # a bias: no row is cheaper with positions


def test_ceilings_are_printed() -> None:
    """A row per task and metric; the ceiling of hyper-cleaning is above its floor."""
    output = run_benchmark("ceilings.py")
    assert {line.split("|")[1].strip() for line in output.splitlines()[2:]} == {
        "hyper_cleaning/digits", "coefficient_tuning/digits", "hyper_representation/digits", "logistic_synthetic",
        "policy_evaluation", "quadratic",
    }
    (row,) = re.findall(r"hyper_cleaning/digits \| 719 \| 610 \| test_accuracy \| (\S+) \| (\S+) \|", output)
    assert float(row[0]) < float(row[1])
