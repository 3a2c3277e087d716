"""The benchmarks run and print what they promise. How fast anything is, they say themselves; no test does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
JUDGED = r": \d+\.\d\d× \(of medians \d+\.\d\d×\), target at (most|least) [\d.]+×: (met|MISSED)"


def printed(script: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--quick", *options],
        capture_output=True, text=True, timeout=300, check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_round_benchmark_runs() -> None:
    """A round in process against bare NumPy: first the same trajectory, then a ratio with its target."""
    said = printed("round.py")
    assert "the same x, y and z after" in said
    assert re.search("engine : bare NumPy" + JUDGED, said)


def test_nodes_benchmark_runs() -> None:
    """Many nodes in process: a ratio with its target, and the memory of one more node."""
    said = printed("engine.py", "--part", "nodes")
    assert re.search("100 nodes : 20 nodes" + JUDGED, said)
    assert re.search(r"-?\d+ KiB per node more", said)


def test_kernels_benchmark_runs() -> None:
    """Top-k and its encoding against torch, against a pass over memory, and against the entropy bound."""
    pytest.importorskip("torch")
    said = printed("kernels.py")
    assert re.search(re.escape("torch.topk + gather : select + encode") + JUDGED, said)
    assert re.search(re.escape("select + encode : in-place pass") + JUDGED, said)
    assert "encoded bytes : entropy bound: 1.039×, target at most 1.05×: met" in said


def test_newsgroups_benchmark_runs() -> None:
    """A round against the naive one, which computes the same, and against one without compression; memory."""
    pytest.importorskip("torch")
    said = printed("newsgroups.py")
    assert "the same y after a round" in said
    assert re.search("naive torch : top-k 20 %" + JUDGED, said)
    assert re.search("top-k 20 % : uncompressed" + JUDGED, said)
    assert re.search(r"bytes of a message : entropy bound: 1\.\d+×, target at most 1\.05×: met", said)
    assert re.search(r"peak memory of a run, engine local: \d\.\d+ GB, target at most 3 GB: met", said)


@pytest.mark.ray
def test_engine_benchmark_runs() -> None:
    """Ray against in process and, for small messages, against gloo, which is first shown to compute the same."""
    said = printed("engine.py", "--part", "small", "--part", "large")
    assert len(re.findall("Ray : in process" + JUDGED, said)) == 2
    assert "gloo and in process: the same x after" in said
    assert re.search("gloo, message by message : Ray" + JUDGED, said)
