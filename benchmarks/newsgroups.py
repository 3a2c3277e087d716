"""Measure a round of C²DFB at the size of 20 Newsgroups: 10 nodes on a ring, 2.03 million parameters each, K = 15.

The compressor is top-k with 20 %. The naive version is a first implementation: a tensor per node, autograd through the
loss, `torch.topk`, `index_add_`, all in one process. After the first round its y is compared with the engine's. With
--data-dir the real messages are used (a folder with scikit_learn_data/), otherwise synthetic text of the same size.
Memory is the peak of the sum over all processes of a separate run (PSS, so that shared pages count once), with the
evaluations and the solve for ψ at its end, once without the process that writes to MLflow; --ray adds the same for the
Ray engine.

The versions run in turn, each in a process of its own with two threads: this code, the lines of its C²DFB as a user's
plugin, and with --against another commit, from a git worktree. --algorithm compares another method with its default
parameters instead.

    python benchmarks/newsgroups.py [--data-dir DIR] [--against COMMIT] [--algorithm NAME]
        [--part naive|versions|memory] [--ray] [--quick]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import numpy as np
from kernels import entropy_bound
from round import RATIO, STEPS, local

from dbo.algorithms.compression.compressors import count_kept
from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.runner import prepare

PROC = Path("/proc")
ROOT = Path(__file__).resolve().parents[1]
NODES = 10


def experiment_values(
    data_dir: str | None, quick: bool, compressor: dict[str, Any], engine: str = "local"
) -> dict[str, Any]:
    """Return the values of the paper's first experiment, or of one on synthetic text of its size."""
    task: dict[str, Any] = {"name": "coefficient_tuning", "dataset": "newsgroups"}
    if data_dir is None or quick:
        features, documents = (4_000, 1_000) if quick else (101_631, 18_846)
        task |= {"dataset": "synthetic_text", "features": features, "classes": 20, "documents": documents}
    steps = {**STEPS, "eta_in": 1.0, "inner_steps": 2 if quick else 15}
    return {
        "nodes": NODES, "dtype": "float32", "topology": {"name": "ring"}, "partition": {"name": "by_class", "h": 0.8},
        "task": task, "algorithm": {"name": "c2dfb", **steps, "compressor": compressor}, "engine": {"name": engine},
        "data_dir": None if quick else data_dir,
    }


def make_experiment(data_dir: str | None, quick: bool, compressor: dict[str, Any], engine: str = "local") -> Experiment:
    """Return the experiment of these values."""
    return Experiment(**experiment_values(data_dir, quick, compressor, engine))


def build_naive(experiment: Experiment) -> tuple[Callable[[], None], Callable[[], Any]]:
    """Return a function that runs a round, and one that returns y."""
    import torch

    made = prepare(experiment)
    problem: Any = made.problem
    cfg = experiment.parts.config
    m, p, c = problem.nodes, problem.dim_x, problem.samples.classes
    k, weights = count_kept(RATIO, p * c), made.network.weights.toarray()

    def make_level(part: Any, index: Any) -> tuple[Any, Any]:
        samples = part.take(index)
        a = samples.features.tocoo()
        at = torch.from_numpy(np.stack([a.row, a.col]).astype(np.int64))
        matrix = torch.sparse_coo_tensor(at, torch.from_numpy(a.data.astype(np.float32)), a.shape).coalesce()
        return matrix, torch.from_numpy(samples.labels)

    train = [make_level(problem.samples.train, problem.train[i]) for i in range(m)]
    val = [make_level(problem.samples.val, problem.val[i]) for i in range(m)]

    def cross_entropy(data: tuple[Any, Any], y: Any) -> Any:
        return torch.nn.functional.cross_entropy(torch.sparse.mm(data[0], y.reshape(p, c)), data[1])

    def g(i: int, x: Any, y: Any) -> Any:
        ridge = problem.scale * (x.exp()[:, None] * y.reshape(p, c) ** 2).sum()
        return cross_entropy(train[i], y) + ridge

    def h(i: int, x: Any, y: Any) -> Any:
        return cross_entropy(val[i], y) / cfg.lam + g(i, x, y)

    def gradient(function: Any, i: int, x: Any, y: Any) -> Any:
        leaf = y.detach().requires_grad_()
        return torch.autograd.grad(function(i, x, leaf), leaf)[0]

    def upper(i: int, x: Any, y: Any, z: Any) -> Any:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(cfg.lam * (g(i, leaf, y) - g(i, leaf, z)), leaf)[0]

    x = [torch.zeros(p) for _ in range(m)]
    loops: dict[str, list[Any]] = {}
    for name, function in (("y", h), ("z", g)):
        d = [torch.zeros(p * c) for _ in range(m)]
        grad = [gradient(function, i, x[i], d[i]) for i in range(m)]
        loops[name] = [function, d, [v.clone() for v in grad], grad]
        loops[name] += [[torch.zeros(p * c) for _ in range(m)] for _ in range(4)]
    u = [upper(i, x[i], loops["y"][1][i], loops["z"][1][i]) for i in range(m)]
    s = [v.clone() for v in u]

    def mix(rows: list[Any]) -> list[Any]:
        return [sum(weights[i, j] * rows[j] for j in range(m) if weights[i, j]) for i in range(m)]

    def send_residuals(rows: list[Any], hats: list[Any], w_hats: list[Any]) -> None:
        messages = []
        for v, hat in zip(rows, hats, strict=True):
            r = v - hat
            indices = torch.topk(r.abs(), k).indices
            messages.append((indices, r[indices]))
            hat.index_add_(0, indices, r[indices])
        for i in range(m):
            for j in range(m):
                if weights[i, j]:
                    indices, values = messages[j]
                    w_hats[i].index_add_(0, indices, values, alpha=float(weights[i, j]))

    def advance() -> None:
        nonlocal u, s, x
        wx, ws = mix(x), mix(s)
        x = [x[i] + cfg.gamma_out * (wx[i] - x[i]) - cfg.eta_out * s[i] for i in range(m)]
        for loop in loops.values():
            function, d, tracker, grad = loop[:4]
            new = [gradient(function, i, x[i], d[i]) for i in range(m)]
            loop[2], loop[3] = [tracker[i] + new[i] - grad[i] for i in range(m)], new
        for _ in range(cfg.inner_steps):
            for loop in loops.values():
                function, d, tracker, grad, d_hat, s_hat, wd_hat, ws_hat = loop
                d = loop[1] = [
                    d[i] + cfg.gamma_in * (wd_hat[i] - d_hat[i]) - cfg.eta_in * tracker[i] for i in range(m)
                ]
                new = [gradient(function, i, x[i], d[i]) for i in range(m)]
                tracker = loop[2] = [
                    tracker[i] + cfg.gamma_in * (ws_hat[i] - s_hat[i]) + new[i] - grad[i] for i in range(m)
                ]
                loop[3] = new
                send_residuals(d, d_hat, wd_hat)
                send_residuals(tracker, s_hat, ws_hat)
        new = [upper(i, x[i], loops["y"][1][i], loops["z"][1][i]) for i in range(m)]
        s = [s[i] + cfg.gamma_out * (ws[i] - s[i]) + new[i] - u[i] for i in range(m)]
        u = new

    return advance, lambda: np.stack([v.numpy() for v in loops["y"][1]])


def make_advance(engine: Any) -> Callable[[], None]:
    """Return a function that runs the next round."""
    count = 0

    def advance() -> None:
        nonlocal count
        count += 1
        engine.advance(count)

    return advance


ROUNDS_OF = """
import sys, time
sys.path[:0] = [ROOT, ROOT + "/benchmarks"]
from round import local
from dbo.platform.experiment import Experiment

engine = local(Experiment(**EXPERIMENT))
engine._threads = 2
print("ready", flush=True)
for count, _ in enumerate(sys.stdin, start=1):
    start, used = time.perf_counter(), time.process_time()
    engine.advance(count)
    print(time.perf_counter() - start, time.process_time() - used, flush=True)
"""


class OtherProcess:
    """A process that runs the rounds of one version of the code, one at a time."""

    def __init__(self, root: Path, chosen: argparse.Namespace, plugin: str | None = None) -> None:
        given = experiment_values(chosen.data_dir, chosen.quick, {"name": "top_k", "ratio": RATIO})
        if chosen.algorithm is not None:
            given["algorithm"] = {"name": chosen.algorithm}
        if plugin is not None:
            given |= {"plugins": [plugin], "algorithm": {**given["algorithm"], "name": PLUGIN_NAME}}
        values = {"ROOT": str(root), "EXPERIMENT": given}
        code = "".join(f"{name} = {value!r}\n" for name, value in values.items()) + ROUNDS_OF
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        if self._read() != "ready":
            raise SystemExit(f"no rounds from {root}")
        self._processor: list[float] = []

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def advance(self) -> float:
        """Run a round; return its seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        wall, processor = map(float, self._read().split())
        self._processor.append(processor)
        return wall

    def processor_times(self, repeats: int) -> measure.Times:
        """Return the seconds of all threads in the last rounds: other processes disturb them less than the clock."""
        return measure.Times(tuple(self._processor[-repeats:]))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


PLUGIN_NAME = "c2dfb_as_a_plugin"


def write_plugin(folder: str) -> str:
    """Write the lines of the built-in C²DFB as a user's plugin; return the file."""
    lines = (ROOT / "algorithms" / "methods" / "c2dfb.py").read_text()
    file = Path(folder) / "own_c2dfb.py"
    file.write_text(lines.replace('    "c2dfb", config=Config', f'    "{PLUGIN_NAME}", config=Config'))
    return str(file)


def compare_processes(chosen: argparse.Namespace) -> None:
    """Run rounds of this code, of its C²DFB as a plugin, and of another commit in turn, on two threads each."""
    with tempfile.TemporaryDirectory() as folder:
        others = {"this code": OtherProcess(ROOT, chosen)}
        if chosen.algorithm is None:
            others["the same lines as a plugin"] = OtherProcess(ROOT, chosen, write_plugin(folder))
        old = Path(folder) / "old"
        if chosen.against:
            git = ["git", "-C", str(ROOT), "worktree"]
            subprocess.run([*git, "add", "--quiet", "--detach", str(old), chosen.against], check=True)
            if not (old / "dbo").exists():      # commits without a public package
                (old / "dbo").mkdir()
                (old / "dbo" / "__init__.py").touch()
                for name in ("algorithms", "dashboards", "platform", "sweeps", "tasks"):
                    (old / "dbo" / name).symlink_to(old / name)
        try:
            if chosen.against:
                others[chosen.against] = OtherProcess(old, chosen)
            repeats = 4
            times = measure.run_in_turn(
                {name: each.advance for name, each in others.items()}, repeats=repeats, warm_up=1)
            processor = {name: each.processor_times(repeats) for name, each in others.items()}
            measure.show(times)
            print(f"  processor time of the same rounds; load {os.getloadavg()[0]:.1f}", flush=True)
            measure.show(processor)
            ours, least = times["this code"], 1.8 if chosen.algorithm is None else 1.0
            if chosen.algorithm is None:
                measure.judge("plugin : built-in", times["the same lines as a plugin"], ours, most=1.2)
            if chosen.against:
                measure.judge(f"{chosen.against} : this code", times[chosen.against], ours, least=least)
                measure.judge(
                    f"{chosen.against} : this code, processor time", processor[chosen.against], processor["this code"],
                    least=least,
                )
        finally:
            for each in others.values():
                each.close()
            if chosen.against:
                subprocess.run([*git, "remove", "--force", str(old)], check=False)


TRACKING = b"dbo.platform.tracking.process"      # in the command line of the process that writes to MLflow


def measure_pss(root: int) -> tuple[int, int]:
    """Return the bytes of a process and its descendants, shared pages in equal parts; with and without tracking."""
    parents: dict[int, int] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    family: set[int] = set()
    children = {root}
    while children:
        family |= children
        children = {pid for pid, parent in parents.items() if parent in family} - family
    total, tracking = 0, 0
    for pid in family:
        try:
            lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
            size = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
            tracking += size if TRACKING in (PROC / str(pid) / "cmdline").read_bytes() else 0
        except (OSError, StopIteration):
            continue
        total += size
    return total, total - tracking


def measure_peak(experiment: Experiment, folder: str) -> tuple[float, float, float]:
    """Return the peak gigabytes of a separate run, with and without tracking, and its seconds per round.

    Evaluations, the solve for ψ at the end and the state file are included.
    """
    file = Path(folder) / f"{experiment.engine['name']}.yaml"
    file.write_text(Experiment(**{**experiment.to_dict(), "rounds": 2, "checkpoint_every": 1000}).to_yaml())
    out = file.with_suffix("")
    run = subprocess.Popen(
        [sys.executable, "-m", "dbo.platform.cli", "run", str(file), "--out", str(out), "--quiet"],
        stdout=subprocess.DEVNULL,
    )
    most, own = 0, 0
    while run.poll() is None:
        most, own = (max(pair) for pair in zip((most, own), measure_pss(run.pid), strict=True))
        time.sleep(0.2)
    if run.returncode:
        raise SystemExit(f"the run for memory failed with exit code {run.returncode}")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return most / 1e9, own / 1e9, (json.loads(lines[-1])["seconds"]) / 2


def main() -> None:
    options = argparse.ArgumentParser(description="A round at the size of 20 Newsgroups.")
    options.add_argument("--data-dir", help="folder with scikit_learn_data/; without it, synthetic text")
    options.add_argument("--ray", action="store_true", help="also measure the memory of a run on Ray")
    options.add_argument("--against", metavar="COMMIT", help="also compare with another commit, on two threads")
    options.add_argument("--algorithm", metavar="NAME", help="compare a round of another method, not of C²DFB")
    options.add_argument("--part", choices=("naive", "versions", "memory"), help="only one part of the measurements")
    options.add_argument("--quick", action="store_true", help="a small problem with few repeats, as a test")
    chosen = options.parse_args()
    if chosen.part in (None, "versions"):
        compare_processes(chosen)
    if chosen.part in (None, "naive"):
        compare_naive(chosen)
    if chosen.part in (None, "memory"):
        measure_memory(chosen)


def compare_naive(chosen: argparse.Namespace) -> None:
    """Compare a round with a first implementation in torch."""
    import torch

    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.enable()
    top_k = make_experiment(chosen.data_dir, chosen.quick, {"name": "top_k", "ratio": RATIO})
    dense = make_experiment(chosen.data_dir, chosen.quick, {"name": "identity"})
    compressed, uncompressed = local(top_k), local(dense)
    advance_naive, y_naive = build_naive(top_k)
    dim, steps = compressed.local_blocks[0].shard.dim_y, top_k.parts.config.inner_steps
    print(
        f"{top_k.task['dataset']}, {dim / 1e6:.2f} million parameters per node, {NODES} nodes, ring, K = {steps}, "
        f"float32, one thread; {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}", flush=True,
    )
    advance = make_advance(compressed)
    advance()
    advance_naive()
    y, expected = np.asarray(compressed.rows("y")), y_naive()
    error = np.linalg.norm(y - expected) / np.linalg.norm(expected)
    # Rounding selects different entries at the threshold: about 1e-3 on the real messages in float32.
    assert error < 1e-2, f"the two are not the same algorithm: the relative difference of y is {error:.1e}"
    print(f"  the same y after a round, relative {error:.0e}", flush=True)
    times = measure.run_in_turn(
        {
            "naive torch": measure.time_rounds(advance_naive, 1),
            "top-k 20 %": measure.time_rounds(advance, 1),
            "uncompressed": measure.time_rounds(make_advance(uncompressed), 1),
        },
        repeats=2 if chosen.quick else 3, warm_up=1 if chosen.quick else 0,
    )
    measure.show(times)
    measure.judge("naive torch : top-k 20 %", times["naive torch"], times["top-k 20 %"], least=5)
    measure.judge("top-k 20 % : uncompressed", times["top-k 20 %"], times["uncompressed"], most=1.6)
    ledger = compressed.ledger()
    sent = ledger.bytes_by_channel()["y_d"].sum() / (NODES * steps * (ledger.packets[0] / (steps + 1)))
    k = ledger.values_by_channel()["y_d"].sum() / (NODES * steps * (ledger.packets[0] / (steps + 1)))
    measure.judge_number("bytes of a message : entropy bound", sent / entropy_bound(int(k), dim), most=1.05)


def measure_memory(chosen: argparse.Namespace) -> None:
    """Measure the peak memory of a run."""
    if not PROC.exists():
        print("  memory: not measured, this system has no /proc", flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        for engine in ("local", "ray") if chosen.ray else ("local",):
            most, own, seconds = measure_peak(
                make_experiment(chosen.data_dir, chosen.quick, {"name": "top_k", "ratio": RATIO}, engine), folder)
            print(f"  {engine}: {seconds:.2f} s a round", flush=True)
            what = f"peak memory of a run, engine {engine}"
            if engine == "local":
                measure.judge_number(f"{what}, without the MLflow process", own, most=1.9, unit=" GB")
                print(f"  with it: {most:.3f} GB", flush=True)
            else:
                measure.judge_number(what, most, most=3, unit=" GB")
                print(f"  without the MLflow process: {own:.3f} GB", flush=True)


if __name__ == "__main__":
    main()
