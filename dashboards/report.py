"""Render `dbo report`: one HTML file that needs only a browser; no network, no server, no storage, no other files."""

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dbo.dashboards import ranking
from dbo.dashboards.charts import curves, nodes
from dbo.dashboards.charts.replay import ReplayPanel, build_replay_panels
from dbo.dashboards.charts.sensitivity import build_sensitivity_panels
from dbo.dashboards.groups import GroupedRuns, group_runs
from dbo.dashboards.load import RunCollection
from dbo.dashboards.palette import sample_scale
from dbo.dashboards.topology import MAX_NODES
from dbo.platform.runs.atomic_io import write_atomically
from dbo.version import find_version

_TEMPLATES = Path(__file__).with_name("templates")
_COUNTS = {1: "One", 2: "Two", 3: "Three", 4: "Four", 5: "Five", 6: "Six", 7: "Seven", 8: "Eight", 9: "Nine"}
_MAX_TITLES, _MAX_VALUES, _MAX_COMMANDS = 6, 5, 4


@dataclass(frozen=True, slots=True)
class FigureSection:
    """A figure of the page, or the reason why there is none."""

    id: str
    title: str
    kind: str                        # which function of report.js builds it
    has_data: bool
    caption: str
    missing: str                     # what it would need
    command: str
    options: dict[str, Any] = field(default_factory=dict)


def write_page(collection: RunCollection, out: Path) -> None:
    """Write the page about these runs, whole or not at all."""
    html = render_page(group_runs(collection))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, html.encode("utf-8", "backslashreplace"), "the report")      # a name may be no Unicode


def render_page(runs: GroupedRuns) -> str:
    """Return the page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )
    data = _build_data(runs)
    return environment.get_template("report.html.j2").render(
        title=_build_title(runs), lead=_describe_runs(runs), claims=_list_claims(runs), alerts=_list_alerts(runs),
        cards=ranking.build_cards(runs), sentences=ranking.summarize(runs), intervals=_describe_intervals(runs),
        rows=ranking.build_rows(runs), has_settings=len(runs.settings) > 1, criteria=ranking.select_criteria(runs),
        figures=_list_figures(runs, data), incidents=data["incidents"], runs=_list_runs(runs),
        commands=_list_commands(runs), version=find_version(), created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        plotly=Markup(read_plotly()), data=Markup(embed_json(data)),
        style=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup("\n".join(
            (_TEMPLATES / name).read_text(encoding="utf-8") for name in ("charts.js", "report.js")
        )),
    )


def embed_json(data: Any) -> str:
    """Return JSON that cannot end the script element around it, whatever the name of a run."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e") \
        .replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def read_plotly() -> str:
    """Return plotly.js of the plotly package, without importing the package, which is slow."""
    spec = find_spec("plotly")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0], "package_data", "plotly.min.js").read_text(encoding="utf-8")


def _build_data(runs: GroupedRuns) -> dict[str, Any]:
    """Return the data that the page's scripts draw."""
    styles = runs.styles | runs.series
    channels, oracles = nodes.stack_channels(runs), nodes.stack_oracle_calls(runs)
    replay = build_replay_panels(runs)
    return {
        "styles": {name: [style.light, style.dark, style.dash] for name, style in styles.items()},
        "axisTitles": {name: name for name in curves.list_own_columns(runs)} | curves.AXIS_TITLES,
        "shortNames": {name: name for name in curves.list_own_columns(runs)} | curves.SHORT_NAMES,
        "panels": curves.build_panels(runs), "curves": curves.build_curves(runs),
        "incidents": curves.list_incidents(runs), "sensitivity": build_sensitivity_panels(runs),
        "channels": channels, "oracles": oracles, "heatmaps": nodes.build_heatmaps(runs),
        "graphs": nodes.build_graphs(runs), "replay": replay,
        "scales": {str(n): sample_scale(n) for n in _count_colours(channels, oracles, replay)},
        "topologies": len({setting.topology for setting in runs.settings}),
    }


def _count_colours(
    channels: nodes.StackedBars | None, oracles: nodes.StackedBars | None, replay: Sequence[ReplayPanel]
) -> set[int]:
    """Return how many colours of the magnitude scale the figures need at once."""
    groups = {len(one) for panel in replay for one in (panel["groups"], (panel["map"] or {"labels": ()})["labels"])}
    return groups | {len(bars["names"]) for bars in (channels, oracles) if bars}


def _list_figures(runs: GroupedRuns, data: dict[str, Any]) -> list[FigureSection]:
    """Return the figures of the page in their order."""
    folders = " ".join(shlex.quote(str(folder)) for folder in runs.collection.folders)

    def section(
        id_: str, title: str, kind: str, has_data: object, caption: str, missing: str, **options: Any
    ) -> FigureSection:
        command = f"dbo report {folders} --figures figures --only {id_}"
        return FigureSection(id_, title, kind, bool(has_data), caption, missing, command, options)

    def curve_section(
        id_: str, title: str, columns: Sequence[str], caption: str, missing: str, log: bool = False
    ) -> FigureSection:
        available = [column for column in columns if _has_curve(data["curves"], column, log)]
        return section(
            id_, title, "curves", available, caption, missing,
            columns=available, log=log, x="round" if log else "comm_mb",
        )

    has_seeds = any(curve["seeds"] > 1 for curve in data["curves"])
    interval = "The shade is the 95 % bootstrap interval of the mean over seeds. "
    shade = interval if has_seeds else "The shade reaches down to the worst node. "
    panels = "One panel per setting, all with the same axes. " if len(runs.settings) > 1 else ""
    crosses = "A cross ends a run that diverged or failed. " if any(c["failed"] for c in data["curves"]) else ""
    sampled = {int(run.last_value("nodes_evaluated") or 0) for run in runs.runs} - {0}
    sample = f"Mean and worst are those of a sample of {min(sampled):,} nodes (eval_nodes). " if sampled else ""
    strip = "The strip below marks lost and replaced workers, divergence and failure. " if data["incidents"] else ""
    has_psi = any(_has_several(curve, "psi") for curve in data["curves"])
    return [
        section(
            "psi", "Upper objective ψ", "curves", has_psi,
            "ψ(x̄) = (1/m) Σ f_i(x̄, y*(x̄)), what a bilevel method minimises, and the norm of its gradient, from "
            f"solves of the lower level. {panels}{interval if has_seeds else ''}{crosses}{strip}",
            "ψ at the end is in the table; psi_every: 1 computes it at every evaluation."
            if any(run.last_value("psi") is not None for run in runs.runs) else
            "It needs a task that declares a strongly convex lower level, and psi_every other than 0.",
            columns=list(curves.PSI_COLUMNS), log=False, x="comm_mb",
        ),
        curve_section(
            "accuracy", "Accuracy", ["node_accuracy_mean", "test_accuracy"],
            f"Test accuracy against communication, training time or rounds. {panels}{shade}{sample}A ring marks the "
            f"first evaluation that reached the target. {crosses}{strip}", "These tasks have no accuracy.",
        ),
        *([curve_section(
            "target", "Target metric", own, f"The task's own metric that the target names. {panels}{crosses}{strip}",
            "",
        )] if (own := curves.list_own_columns(runs)) else []),
        curve_section(
            "loss", "Loss", ["test_loss", "upper_loss", "lower_loss"],
            f"Losses of the mean model (x̄, ȳ). {panels}{shade if has_seeds else ''}{crosses}{strip}",
            "No run has an evaluation yet.",
        ),
        section(
            "sensitivity", "Sensitivity", "sensitivity", data["sensitivity"],
            "For each value of a parameter: the final metric (dots are runs, the line is their mean with its 95 % "
            "interval) and the megabytes to the target. There is a panel for each combination of the other parameters. "
            "Grey: accuracy of the nodes' own models beside that of the mean model, or the other way round. Below each "
            "panel: the claim and the measured result; values tie unless their paired difference over seeds is larger "
            "than its interval.",
            "It needs runs of one algorithm with different values of K, ratio, λ or another parameter.",
        ),
        curve_section(
            "consensus", "Consensus error", ["consensus_x", "consensus_y"],
            "Root mean square distance of the nodes' variables to their mean: √(Ω₁/m) of the paper for x, √(Ω₂/m) of "
            f"its inner loop for y. {panels}The grey line is (1 − ρ)ᵗ with the spectral gap ρ of the graph: the rate "
            "of averaging alone, from the largest error. Gradient steps and compression make curves fall more slowly, "
            f"or rise. {strip}",
            "All nodes agree at every evaluation, or there is no evaluation.", log=True,
        ),
        section(
            "replay", "Time on other networks", "replay", data["replay"],
            "Seconds to the target if the same packets travelled over another network (dbo replay): a node's sends "
            "share its uplink, computing times are measured. The map shows who reaches the target first for each "
            "latency and uplink, with equal nodes and no noise.",
            "It needs at least two algorithms with recorded traffic, one of which reaches the target.",
        ),
        section(
            "channels", "Bytes by channel", "bars", data["channels"],
            "Bytes that all nodes broadcast in a whole run, headers included, counted once per sender; mean over "
            f"seeds. A channel is a variable that nodes send. {nodes.explain_channels(data['channels'])}",
            "It needs nodes.jsonl in the run folders.", source="channels", unit="MB broadcast",
        ),
        section(
            "oracles", "Oracle calls", "bars", data["oracles"],
            "Gradients, Hessian-vector and Jacobian-vector products that one node evaluated in a whole run; mean over "
            "seeds.", "No run has an evaluation yet.", source="oracles", unit="calls",
        ),
        section(
            "nodes", "Accuracy of each node", "heatmap", data["heatmaps"],
            "One row per node, one column per evaluation; brighter is better. A dark row is a node that lags behind.",
            "It needs accuracies in nodes.jsonl.",
        ),
        section(
            "topology", "Topology", "topology", data["graphs"],
            "Colour of a node: distance of its x to the mean (log scale, the same at every round). Width of a link: "
            "bytes carried so far in both directions. Move the slider to another round.",
            f"It needs network.json and nodes.jsonl, and at most {MAX_NODES} nodes.",
        ),
    ]


def _has_several(curve: curves.Curve, column: str) -> bool:
    """Decide whether a curve has more than its end."""
    return column in curve["y"] and sum(value is not None for value in curve["y"][column]["mean"]) > 1


def _has_curve(all_curves: Sequence[curves.Curve], column: str, log: bool) -> bool:
    """Decide whether any curve has a value in this column that the axis can show."""
    return any(
        column in curve["y"] and (not log or any((value or 0) > 0 for value in curve["y"][column]["mean"]))
        for curve in all_curves
    )


def _build_title(runs: GroupedRuns) -> str:
    names = list(dict.fromkeys(group.name for group in runs.collection.groups)) or \
        list(dict.fromkeys(run.name for run in runs.runs))
    if names == ["dbo"]:       # the default name
        names = runs.algorithms
    rest = f" and {len(names) - _MAX_TITLES} more" if len(names) > _MAX_TITLES else ""
    return ", ".join(names[:_MAX_TITLES]) + rest


def _describe_runs(runs: GroupedRuns) -> str:
    """Say in a sentence or two what was run."""
    names, settings = runs.algorithms, runs.settings
    subject = f"{_COUNTS.get(len(names), str(len(names)))} algorithms" if len(names) > 1 else names[0]
    variants = len({(group.algorithm, group.variant) for group in runs.seed_groups})
    subject += f", {variants} variants" if variants > len(names) else ""
    tasks, node_counts = sorted({setting.task for setting in settings}), sorted({setting.nodes for setting in settings})
    topologies = list(dict.fromkeys(setting.topology for setting in settings))
    partitions = list(dict.fromkeys(setting.partition for setting in settings))
    rounds = sorted({str(run.experiment.get("rounds", "?")) for run in runs.runs}, key=lambda one: (len(one), one))
    seeds = len({str(run.seed) for run in runs.runs})
    return (
        f"{subject} on {' and '.join(tasks)}: {_join(node_counts)} nodes, topology {_join(topologies)}, "
        f"partition {_join(partitions)}, {_join(rounds)} rounds, {seeds} seed{'s' if seeds > 1 else ''}. "
        f"{_count_runs(len(runs.runs))} in total."
    )


def _list_claims(runs: GroupedRuns) -> list[str]:
    """Return the claims that the sweeps are to check."""
    return list(dict.fromkeys(group.claim for group in runs.collection.groups if group.claim))


def _join(values: Sequence[Any]) -> str:
    rest = f" and {len(values) - _MAX_VALUES} more" if len(values) > _MAX_VALUES else ""
    return ", ".join(map(str, values[:_MAX_VALUES])) + rest


def _list_alerts(runs: GroupedRuns) -> list[str]:
    """Return what limits the conclusions of the page: runs that failed, are incomplete or were left out."""
    statuses, alerts = Counter(run.status for run in runs.runs), []
    for status in ("diverged", "failed", "interrupted", "running"):
        if count := statuses[status]:
            verb = {"interrupted": ("was ", "were "), "running": ("is still ", "are still ")}.get(status, ("", ""))
            alerts.append(f"{_count_runs(count)} {verb[count > 1]}{status}.")
    if count := sum(run.last_value("psi_converged") == 0 for run in runs.runs):
        alerts.append(f"ψ of {_count_runs(count)} is approximate: its solve missed the tolerance; nobody wins by it.")
    if pending := sum(group.pending for group in runs.collection.groups):
        alerts.append(f"{_count_runs(pending)} {'have' if pending > 1 else 'has'} not started.")
    if single := sum(len(run.records) <= 1 for run in runs.runs):
        alerts.append(f"{_count_runs(single)} with at most one evaluation: no curve.")
    if runs.duplicates:
        alerts.append(f"{_count_runs(runs.duplicates)} left out: duplicates of another experiment.")
    return alerts


def _count_runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"


def _describe_intervals(runs: GroupedRuns) -> str:
    if runs.max_seeds == 1:
        return "One seed each: no confidence intervals."
    return "Small print under a number: 95 % bootstrap interval of the mean over seeds."


def _list_runs(runs: GroupedRuns) -> list[dict[str, Any]]:
    return [
        {
            "folder": str(run.folder), "name": run.name, "label": runs.label_run(group, run), "seed": run.seed,
            "status": run.status, "error": run.error or "", "has_failed": run.has_failed,
            "evaluations": len(run.records),
            "rounds": f"{int(run.columns['round'][-1]) if run.records else 0} of {run.experiment.get('rounds', '?')}",
        }
        for group in runs.seed_groups for run in group.runs
    ]


def _list_commands(runs: GroupedRuns) -> list[str]:
    """Return the commands that reproduce these runs."""
    commands = [group.command for group in runs.collection.groups if group.command]
    single = [run for run in runs.runs if run.group is None or not run.group.command]
    commands += [f"dbo run {shlex.quote(str(run.folder / 'experiment.yaml'))}" for run in single[:_MAX_COMMANDS]]
    rest = len(single) - _MAX_COMMANDS
    return commands + ([f"# and {rest} more experiment.yaml"] if rest > 0 else [])
