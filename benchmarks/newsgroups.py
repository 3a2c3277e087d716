"""Measure a round of C²DFB at the size of 20 Newsgroups: 10 nodes on a ring, 2.03 million parameters each, K = 15.

The compressor is top-k with 20 %. The naive version is a first implementation: a tensor per node, autograd through the
loss, `torch.topk`, `index_add_`, all in one process. After the first round its y is compared with the engine's. With
--data-dir the real messages are used (a folder with scikit_learn_data/), otherwise synthetic text of the same size.
Memory is the peak of the sum over all processes of a separate run (PSS, so that shared pages count once), with the
evaluations and the solve for ψ at its end, once without the process that writes to MLflow; --ray adds the same for the
Ray engine. With --against it is compared with that commit's, once with ψ, which old commits do not compute, and once
without.

The versions run in turn, each in a process of its own with two threads: this code, the lines of its C²DFB as a user's
plugin, and with --against another commit, from a git worktree. --algorithm compares another method with its default
parameters instead; --algorithm all every method that both versions have, with the other commit's parameters.

    python benchmarks/newsgroups.py [--data-dir DIR] [--against COMMIT] [--algorithm NAME|all] [--methods NAME,NAME]
        [--part naive|versions|memory] [--ray] [--quick]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import measure
import numpy as np
from kernels import entropy_bound
from round import RATIO, STEPS, local

from dbo.algorithms.compression.compressors import count_kept
from dbo.platform.config import yaml_io
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


# Prints method → parameters, with the presets of the experiment; methods that it cannot have are left out.
METHODS_OF = """
import json, sys
from dataclasses import fields
sys.path.insert(0, ROOT)
from dbo.algorithms.registry import algorithms
from dbo.platform.experiment import Experiment

found = {}
for name in algorithms():
    try:
        config = Experiment(**{**EXPERIMENT, "algorithm": {"name": name}}).parts.config
    except Exception:
        continue
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    plain = {key: value for key, value in values.items() if isinstance(value, (bool, int, float, str))}
    found[name] = plain | ({"compressor": EXPERIMENT["algorithm"]["compressor"]} if "compressor" in values else {})
print(json.dumps(found))
"""


def choose_values(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the experiment, with C²DFB."""
    return experiment_values(chosen.data_dir, chosen.quick, {"name": "top_k", "ratio": RATIO})


def list_methods(root: Path, chosen: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the methods of a version of the code that the experiment can have, with their parameters."""
    code = f"ROOT, EXPERIMENT = {str(root)!r}, {choose_values(chosen)!r}\n" + METHODS_OF
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(root)}, stdout=subprocess.PIPE, text=True,
        check=True,
    )
    methods: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return methods


class NoRoundsError(Exception):
    """A version of the code cannot run the experiment; the last line of what it printed."""


class OtherProcess:
    """A process that runs the rounds of one version of the code, one at a time."""

    def __init__(
        self, root: Path, chosen: argparse.Namespace, algorithm: dict[str, Any] | None = None, plugin: str | None = None
    ) -> None:
        given = choose_values(chosen)
        if algorithm is not None:
            given["algorithm"] = algorithm
        if plugin is not None:
            given |= {"plugins": [plugin], "algorithm": {**given["algorithm"], "name": PLUGIN_NAME}}
        values = {"ROOT": str(root), "EXPERIMENT": given}
        code = "".join(f"{name} = {value!r}\n" for name, value in values.items()) + ROUNDS_OF
        self._errors = tempfile.TemporaryFile("w+")     # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        self._processor: list[float] = []
        if self._read() != "ready":
            raise NoRoundsError(self._describe_failure())

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _describe_failure(self) -> str:
        self.close()
        self._errors.seek(0)
        return (self._errors.read().strip().splitlines() or ["no message"])[-1].strip()

    def advance(self) -> float:
        """Run a round; return its seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        if not (answer := self._read()):
            raise NoRoundsError(self._describe_failure())
        wall, processor = map(float, answer.split())
        self._processor.append(processor)
        return wall

    def processor_times(self, repeats: int) -> measure.Times:
        """Return the seconds of all threads in the last rounds: other processes disturb them less than the clock."""
        return measure.Times(tuple(self._processor[-repeats:]))

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


PLUGIN_NAME = "c2dfb_as_a_plugin"


def write_plugin(folder: str) -> str:
    """Write the lines of the built-in C²DFB as a user's plugin; return the file."""
    lines = (ROOT / "algorithms" / "methods" / "c2dfb.py").read_text()
    file = Path(folder) / "own_c2dfb.py"
    file.write_text(lines.replace('    "c2dfb", config=Config', f'    "{PLUGIN_NAME}", config=Config'))
    return str(file)


@contextmanager
def check_out(commit: str) -> Iterator[Path]:
    """Yield a git worktree of another commit, in which `import dbo` works."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "old"
        subprocess.run([*git, "add", "--quiet", "--detach", str(root), commit], check=True)
        try:
            if not (root / "dbo").exists():     # commits without a public package
                (root / "dbo").mkdir()
                (root / "dbo" / "__init__.py").touch()
                for name in ("algorithms", "dashboards", "platform", "sweeps", "tasks"):
                    (root / "dbo" / name).symlink_to(root / name)
            yield root
        finally:
            subprocess.run([*git, "remove", "--force", str(root)], check=False)


def compare_processes(chosen: argparse.Namespace, old: Path | None) -> None:
    """Run rounds of this code, of its C²DFB as a plugin, and of another commit in turn, on two threads each."""
    algorithm = None if chosen.algorithm is None else {"name": chosen.algorithm}
    others: dict[str, OtherProcess] = {}
    with tempfile.TemporaryDirectory() as folder, close_all(others):
        others["this code"] = OtherProcess(ROOT, chosen, algorithm)
        if algorithm is None:
            others["the same lines as a plugin"] = OtherProcess(ROOT, chosen, plugin=write_plugin(folder))
        if old is not None:
            others[chosen.against] = OtherProcess(old, chosen, algorithm)
        times, processor = time_processes(others, repeats=4)
        ours, least = times["this code"], 1.8 if algorithm is None else 1.0
        if algorithm is None:
            measure.judge("plugin : built-in", times["the same lines as a plugin"], ours, most=1.2)
        if old is not None:
            measure.judge(f"{chosen.against} : this code", times[chosen.against], ours, least=least)
            measure.judge(
                f"{chosen.against} : this code, processor time", processor[chosen.against], processor["this code"],
                least=least,
            )


@contextmanager
def close_all(processes: dict[str, OtherProcess]) -> Iterator[None]:
    """Close the processes at the end."""
    try:
        yield
    finally:
        for each in processes.values():
            each.close()


def time_processes(
    processes: dict[str, OtherProcess], repeats: int
) -> tuple[dict[str, measure.Times], dict[str, measure.Times]]:
    """Run rounds in turn; print and return their seconds and their processor time."""
    times = measure.run_in_turn({name: each.advance for name, each in processes.items()}, repeats=repeats, warm_up=1)
    processor = {name: each.processor_times(repeats) for name, each in processes.items()}
    measure.show(times)
    print(f"  processor time of the same rounds; load {os.getloadavg()[0]:.1f}", flush=True)
    measure.show(processor)
    return times, processor


def compare_methods(chosen: argparse.Namespace, old: Path) -> None:
    """Compare a round of every method that both versions have, with the parameters of the other commit."""
    before, now = list_methods(old, chosen), list_methods(ROOT, chosen)
    for version, here, there in ((chosen.against, before, now), ("this code", now, before)):
        if only := [name for name in here if name not in there]:
            print(f"  skipped, only in {version}: {', '.join(only)}", flush=True)
    wanted = None if chosen.methods is None else chosen.methods.split(",")
    if unknown := [name for name in wanted or () if name not in before or name not in now]:
        raise SystemExit(f"--methods: not in both versions: {', '.join(unknown)}")
    for name in wanted or [name for name in before if name in now]:
        processes: dict[str, OtherProcess] = {}
        with close_all(processes):
            try:
                for version, root in ((chosen.against, old), ("this code", ROOT)):
                    processes[version] = OtherProcess(root, chosen, {"name": name, **before[name]})
                print(f"{name}", flush=True)
                _, processor = time_processes(processes, repeats=2 if chosen.quick else 8)
            except NoRoundsError as error:
                print(f"  {name} skipped, it does not run with the parameters of {chosen.against}: {error}", flush=True)
                continue
            measure.judge(
                f"{chosen.against} : this code, {name}, processor time", processor[chosen.against],
                processor["this code"], least=1.0,
            )


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


def measure_peak(values: dict[str, Any], folder: str, root: Path = ROOT) -> tuple[float, float, float]:
    """Return the peak gigabytes of a separate run, with and without tracking, and its seconds per round.

    Evaluations, the solve for ψ at the end and the state file are included. `root` is the version of the code.
    """
    file = Path(tempfile.mkdtemp(dir=folder)) / "experiment.yaml"
    file.write_text(yaml_io.dump(values))
    out = file.with_suffix("")
    run = subprocess.Popen(
        [sys.executable, "-m", "dbo.platform.cli", "run", str(file), "--out", str(out), "--quiet"],
        stdout=subprocess.DEVNULL, cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
    )
    most, own = 0, 0
    while run.poll() is None:
        most, own = (max(pair) for pair in zip((most, own), measure_pss(run.pid), strict=True))
        time.sleep(0.2)
    if run.returncode:
        raise SystemExit(f"the run for memory in {root} failed with exit code {run.returncode}")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return most / 1e9, own / 1e9, (json.loads(lines[-1])["seconds"]) / 2


def main() -> None:
    options = argparse.ArgumentParser(description="A round at the size of 20 Newsgroups.")
    options.add_argument("--data-dir", help="folder with scikit_learn_data/; without it, synthetic text")
    options.add_argument("--ray", action="store_true", help="also measure the memory of a run on Ray")
    options.add_argument("--against", metavar="COMMIT", help="also compare with another commit, on two threads")
    options.add_argument(
        "--algorithm", metavar="NAME",
        help="compare a round of another method, not of C²DFB; all: of every method that both versions have")
    options.add_argument("--methods", metavar="NAMES", help="with --algorithm all: only these, separated by commas")
    options.add_argument("--part", choices=("naive", "versions", "memory"), help="only one part of the measurements")
    options.add_argument("--quick", action="store_true", help="a small problem with few repeats, as a test")
    chosen = options.parse_args()
    if chosen.algorithm == "all" and chosen.against is None:
        options.error("--algorithm all needs --against COMMIT")
    if chosen.methods is not None and chosen.algorithm != "all":
        options.error("--methods needs --algorithm all")
    if chosen.data_dir is not None:
        chosen.data_dir = str(Path(chosen.data_dir).resolve())      # runs have other working directories
    with check_out(chosen.against) if chosen.against else nullcontext() as old:
        if chosen.part in (None, "versions"):
            if chosen.algorithm == "all" and old is not None:
                compare_methods(chosen, old)
            else:
                compare_processes(chosen, old)
        if chosen.part in (None, "naive"):
            compare_naive(chosen)
        if chosen.part in (None, "memory"):
            measure_memory(chosen, old)


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


def measure_memory(chosen: argparse.Namespace, old: Path | None) -> None:
    """Measure the peak memory of a run, and compare it with that of another commit."""
    if not PROC.exists():
        print("  memory: not measured, this system has no /proc", flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        if old is not None:     # a new worktree compiles its kernels in its first run, which takes memory
            small = experiment_values(None, True, {"name": "top_k", "ratio": RATIO}) | {"rounds": 1}
            for root in (ROOT, old):
                measure_peak(small, folder, root)
        for engine in ("local", "ray") if chosen.ray else ("local",):
            values = choose_values(chosen) | {"engine": {"name": engine}, "rounds": 2, "checkpoint_every": 1000}
            most, own, seconds = measure_peak(values, folder)
            print(f"  {engine}: {seconds:.2f} s a round", flush=True)
            what = f"peak memory of a run, engine {engine}"
            if engine == "local":
                measure.judge_number(f"{what}, without the MLflow process", own, most=1.9, unit=" GB")
                print(f"  with it: {most:.3f} GB", flush=True)
            else:
                measure.judge_number(what, most, most=3, unit=" GB")
                print(f"  without the MLflow process: {own:.3f} GB", flush=True)
            if old is not None:
                before, _, _ = measure_peak(values, folder, old)
                without, _, _ = measure_peak(values | {"psi_every": None}, folder)
                print(f"  all processes: {chosen.against} {before:.3f} GB, this code {most:.3f} GB, "
                      f"without ψ {without:.3f} GB", flush=True)
                for which, peak in (("with ψ", most), ("without ψ", without)):
                    measure.judge_number(
                        f"this code {which} : {chosen.against}, {what}, all processes", peak / before, most=1)


if __name__ == "__main__":
    main()
