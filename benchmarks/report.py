"""Measure the time, the size and the scrolling of a report over many long runs.

    python benchmarks/report.py [--runs 60] [--evaluations 1000] [--browser /usr/bin/chromium]

The runs are synthetic: three topologies × two partitions, as many seeds as needed, ten nodes each.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

ALGORITHMS = ("c2dfb", "c2dfb_nc", "madsbo", "mdbo", "vrdbo")
TOPOLOGIES = ("ring", "two_hop", "erdos_renyi")
PARTITIONS = ({"name": "iid"}, {"name": "by_class", "h": 0.8})
NODES = 10


def write_runs(folder: Path, runs: int, evaluations: int) -> None:
    """Write so many run folders with smooth, noisy curves."""
    rng, texts = np.random.default_rng(0), {}
    for number in range(runs):
        rest, algorithm = divmod(number, len(ALGORITHMS))
        rest, topology = divmod(rest, len(TOPOLOGIES))
        seed, partition = divmod(rest, len(PARTITIONS))
        path = folder / f"run-{number:03d}"
        path.mkdir(parents=True)
        (path / "experiment.yaml").write_text(json.dumps({      # JSON is YAML
            "name": "many", "seed": seed, "nodes": NODES, "rounds": evaluations - 1, "task": {"name": "synthetic"},
            "algorithm": {"name": ALGORITHMS[algorithm]}, "topology": {"name": TOPOLOGIES[topology]},
            "partition": PARTITIONS[partition],
        }))
        edges = [[i, (i + 1) % NODES] for i in range(NODES)]
        (path / "network.json").write_text(json.dumps(
            {"nodes": NODES, "links": NODES, "spectral_gap": 0.127, "edges": edges}))
        (path / "events.jsonl").write_text(json.dumps({"timestamp": 0.0, "kind": "started", "after_round": 0}) + "\n")
        if (algorithm, seed) not in texts:      # shared by settings: writing them takes longer than the report
            timescale = 20.0 * (algorithm + 1)
            texts[algorithm, seed] = (
                "".join(_make_metrics(rng, evaluations, timescale)), "".join(_make_nodes(rng, evaluations, timescale)))
        for name, text in zip(("metrics.jsonl", "nodes.jsonl"), texts[algorithm, seed], strict=True):
            (path / name).write_text(text)
        (path / "summary.json").write_text(json.dumps({"status": "finished", "algorithm": ALGORITHMS[algorithm]}))


def _make_metrics(rng: np.random.Generator, evaluations: int, timescale: float) -> list[str]:
    noise = 0.01 * rng.standard_normal(evaluations)
    lines = []
    for t in range(evaluations):
        accuracy = 0.95 - 0.85 * np.exp(-t / timescale) + noise[t]
        lines.append(json.dumps({
            "round": t, "seconds": 0.013 * t, "test_accuracy": accuracy, "test_loss": 2.3 - accuracy,
            "upper_loss": 2.4 - accuracy, "lower_loss": 2.5 - accuracy, "node_accuracy_mean": accuracy,
            "node_accuracy_min": accuracy - 0.05, "bytes_broadcast": 12345 * t, "bytes_links": 24690 * t, "packets": t,
            "comm_mb": 0.02469 * t, "paper_megabytes": 0.01 * t, "consensus_x": 0.1 * np.exp(-t / 300) * (t > 0),
            "consensus_y": np.exp(-t / 400) * (t > 0), "direction_norm": 1 / (t + 1), "gradient_calls": 51 * t,
            "hvp_calls": 7 * t, "jvp_calls": t, "timestamp": 1.7e9 + t,
        }) + "\n")
    return lines


def _make_nodes(rng: np.random.Generator, evaluations: int, timescale: float) -> list[str]:
    mean = 0.95 - 0.85 * np.exp(-np.arange(evaluations) / timescale)
    accuracy = mean[:, None] + 0.01 * rng.standard_normal((1, NODES))
    distance = rng.uniform(0.5, 1.5, (evaluations, NODES)) * np.exp(-np.arange(evaluations) / 300)[:, None]
    return [
        json.dumps({
            "round": t, "accuracy": accuracy[t].round(6).tolist(), "apart_x": distance[t].tolist(),
            "apart_y": distance[t].tolist(), "bytes": [1234 * t] * NODES, "channels": {"x": 5000 * t, "y": 7345 * t},
        }) + "\n"
        for t in range(evaluations)
    ]


def measure_scrolling(page_file: Path, browser: str) -> dict[str, float]:
    """Open the page and scroll from top to end; return milliseconds until it is ready, and of the frames."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_context(offline=True, viewport={"width": 1280, "height": 800}).new_page()
        start = time.perf_counter()
        page.goto(page_file.resolve().as_uri())
        page.wait_for_selector(".panel", state="attached")
        ready = time.perf_counter() - start
        frames = page.evaluate("""() => new Promise(done => {
            const gaps = []; let last = performance.now();
            const step = now => {
                gaps.push(now - last); last = now; scrollBy(0, 40);
                if (scrollY + innerHeight < document.documentElement.scrollHeight - 2) requestAnimationFrame(step);
                else done(gaps.slice(1));
            };
            requestAnimationFrame(step);
        })""")
        chromium.close()
    return {
        "ready_ms": 1000 * ready, "frames": len(frames), "frame_median_ms": float(np.median(frames)),
        "frame_p95_ms": float(np.quantile(frames, 0.95)), "frame_max_ms": float(np.max(frames)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--browser", help="also open and scroll the page in this Chromium")
    options = parser.parse_args()
    from dbo.dashboards.load import load_runs
    from dbo.dashboards.report import write_page

    with tempfile.TemporaryDirectory() as folder:
        runs, out = Path(folder) / "runs", Path(folder) / "report.html"
        write_runs(runs, options.runs, options.evaluations)
        wall, processor = time.perf_counter(), time.process_time()
        write_page(load_runs([runs]), out)
        print(json.dumps({
            "runs": options.runs, "evaluations": options.evaluations, "seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - processor, "megabytes": out.stat().st_size / 1e6,
            **(measure_scrolling(out, options.browser) if options.browser else {}),
        }, indent=2))


if __name__ == "__main__":
    main()
