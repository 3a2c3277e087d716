"""`dbo report`: one HTML file that needs nothing but a browser: no network, no server, no storage, no sibling files."""

import json
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dbo.dashboards import ranking
from dbo.dashboards.charts import curves, nodes
from dbo.dashboards.charts.sensitivity import sensitivity
from dbo.dashboards.groups import Ordered, order
from dbo.dashboards.load import Gathered
from dbo.dashboards.palette import look, shades
from dbo.dashboards.topology import DRAWN

_TEMPLATES = Path(__file__).with_name("templates")
_COUNTS = {1: "One", 2: "Two", 3: "Three", 4: "Four", 5: "Five", 6: "Six", 7: "Seven", 8: "Eight", 9: "Nine"}


def write(gathered: Gathered, out: Path) -> None:
    """The page about these runs, whole or not at all."""
    html = render(order(gathered))
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.new")
    try:
        aside.write_text(html, encoding="utf-8")
        os.replace(aside, out)
    finally:
        aside.unlink(missing_ok=True)


def render(ordered: Ordered) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )
    data = _data(ordered)
    return environment.get_template("report.html.j2").render(
        title=_title(ordered), lead=_lead(ordered), claims=_claims(ordered), alerts=_alerts(ordered),
        cards=ranking.cards(ordered), words=ranking.words(ordered), intervals=_intervals(ordered),
        table=ranking.rows(ordered),
        several=len(ordered.settings) > 1, measures=ranking.measures(ordered), figures=_figures(ordered, data),
        incidents=data["incidents"], runs=_runs(ordered), commands=_commands(ordered), version=version("dbo"),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), plotly=Markup(_plotly()), data=Markup(embed(data)),
        style=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        script=Markup("\n".join(
            (_TEMPLATES / name).read_text(encoding="utf-8") for name in ("charts.js", "report.js")
        )),
    )


def embed(data: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever a run is called."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e") \
        .replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _plotly() -> str:
    """plotly.js as the plotly package ships it; found without importing the package, which is slow."""
    from importlib.util import find_spec

    spec = find_spec("plotly")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def _data(ordered: Ordered) -> dict[str, Any]:
    looks = {name: look(name) for name in ordered.algorithms}
    channels, oracles = nodes.channels(ordered), nodes.oracles(ordered)
    return {
        "looks": {name: [one.light, one.dark, one.dash] for name, one in looks.items()},
        "names": curves.NAMES, "short": curves.SHORT,
        "panels": curves.panels(ordered), "curves": curves.curves(ordered),
        "incidents": curves.incidents(ordered), "sensitivity": sensitivity(ordered),
        "channels": channels, "oracles": oracles, "heat": nodes.heat(ordered),
        "graphs": nodes.graphs(ordered),
        "shades": {str(n): shades(n) for n in {len(part["names"]) for part in (channels, oracles) if part}},
        "columns": len({setting.topology for setting in ordered.settings}),
    }


def _figures(ordered: Ordered, data: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures in their order; one without data says in a line what it would need."""
    there = {column for curve in data["curves"] for column in curve["y"]}
    many = any(curve["seeds"] > 1 for curve in data["curves"])
    shade = "The shade is the 95 % bootstrap interval of the mean over seeds. " if many else \
        "The shade reaches down to the worst node. "
    small = "A panel per setting, all with the same axes. " if len(ordered.settings) > 1 else ""
    went_wrong = "Crosses end runs that diverged or failed. " if any(c.get("bad") for c in data["curves"]) else ""
    marked = "The strip underneath marks lost and replaced processes, divergence and failure. " \
        if data["incidents"] else ""
    figures = [
        _curves("accuracy", "Accuracy", ["node_accuracy_mean", "test_accuracy"], there, (
            f"Test accuracy against what it costs. {small}{shade}Rings mark where the target was reached, read off all "
            f"evaluations. {went_wrong}{marked}"), "None of these tasks has an accuracy."),
        _curves("loss", "Loss", ["test_loss", "upper_loss", "lower_loss"], there, (
            f"Losses of the mean model (x̄, ȳ). {small}{shade if many else ''}{went_wrong}{marked}"),
            "No run has an evaluation yet."),
        {
            "id": "sensitivity", "title": "Sensitivity", "kind": "sensitivity", "there": bool(data["sensitivity"]),
            "absent": "Needs runs of one algorithm with different values of K, ratio, λ or another parameter.",
            "caption": "Accuracy at the end (dots are runs, the line is their mean with its 95 % interval) and "
            "megabytes to the target, for each value of a parameter, beside what is claimed of it.",
            "options": {},
        },
        _curves("consensus", "Consensus error", ["consensus_x", "consensus_y"], there & _positive(data), (
            "Root mean square distance of the nodes' variables to their mean: √(Ω₁/m) of the paper for x, √(Ω₂/m) of "
            f"its inner loop for y. {small}The grey line is the rate of the graph's spectral gap, (1 − ρ)ᵗ: so fast "
            "would averaging alone let the largest error vanish. Curves that fall more slowly, or rise, are fed by "
            f"gradient steps and compression. {marked}"),
            "All nodes agree at every evaluation, or there is none.", log=True),
        {
            "id": "channels", "title": "Bytes by channel", "kind": "bars", "there": data["channels"] is not None,
            "absent": "Needs nodes.jsonl in the runs' folders.",
            "caption": "What all nodes broadcast in a whole run, headers included, counted once per sender; mean over "
            "seeds.", "options": {"source": "channels", "unit": "MB broadcast"},
        },
        {
            "id": "oracles", "title": "Oracle calls", "kind": "bars", "there": data["oracles"] is not None,
            "absent": "No run has an evaluation yet.",
            "caption": "Gradients, Hessian-vector and Jacobian-vector products that one node evaluated in a whole run; "
            "mean over seeds.", "options": {"source": "oracles", "unit": "calls"},
        },
        {
            "id": "nodes", "title": "Accuracy of each node", "kind": "heat", "there": bool(data["heat"]),
            "absent": "Needs accuracies in nodes.jsonl.",
            "caption": "A row per node, a column per evaluation, brighter is better: a dark row is a node left behind.",
            "options": {},
        },
        {
            "id": "topology", "title": "Topology", "kind": "topology", "there": data["graphs"] is not None,
            "absent": f"Needs network.json and nodes.jsonl, and {DRAWN} nodes at most.",
            "caption": "Nodes coloured by the distance of their x to the mean of all (log scale, the same at every "
            "round), links by the bytes that they carried so far, both ways. Drag the slider through the rounds.",
            "options": {},
        },
    ]
    folders = " ".join(shlex.quote(str(place)) for place in ordered.gathered.places)
    for figure in figures:
        figure["command"] = f"dbo report {folders} --figures figures --only {figure['id']}"
    return figures


def _curves(
    id_: str, title: str, columns: Sequence[str], there: set[str], caption: str, absent: str, log: bool = False
) -> dict[str, Any]:
    drawn = [column for column in columns if column in there]
    return {
        "id": id_, "title": title, "kind": "curves", "there": bool(drawn), "absent": absent, "caption": caption,
        "options": {"ys": drawn, "log": log, "against": "round" if log else "comm_mb"},
    }


def _positive(data: dict[str, Any]) -> set[str]:
    """Columns that a log axis can show."""
    return {
        column for curve in data["curves"] for column, y in curve["y"].items() if any((v or 0) > 0 for v in y["v"])
    }


def _title(ordered: Ordered) -> str:
    names = list(dict.fromkeys(group.name for group in ordered.gathered.groups)) or \
        list(dict.fromkeys(run.name for run in ordered.runs))
    if names == ["dbo"]:       # nobody gave it a name
        names = ordered.algorithms
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _lead(ordered: Ordered) -> str:
    """What was run, in a sentence or two."""
    algorithms = ordered.algorithms
    who = f"{_COUNTS.get(len(algorithms), str(len(algorithms)))} algorithms" if len(algorithms) > 1 else algorithms[0]
    settings = ordered.settings
    tasks, nodes = sorted({s.task for s in settings}), sorted({s.nodes for s in settings})
    graphs = list(dict.fromkeys(setting.topology for setting in settings))
    parts = list(dict.fromkeys(setting.partition for setting in settings))
    rounds = sorted({str(run.experiment.get("rounds", "?")) for run in ordered.runs}, key=lambda one: (len(one), one))
    seeds = len({str(run.seed) for run in ordered.runs})
    variants = len({(cell.algorithm, cell.variant) for cell in ordered.cells})
    who += f", {variants} variants" if variants > len(algorithms) else ""
    text = f"{who} on {' and '.join(tasks)}: {_some(nodes)} nodes, topology {_some(graphs)}, " \
        f"data {_some(parts)}, {_some(rounds)} rounds, {seeds} seed{'s' if seeds > 1 else ''}."
    return text + f" {_runs_of(len(ordered.runs))} in all."


def _claims(ordered: Ordered) -> list[str]:
    """What sweeps say that they are to show."""
    return list(dict.fromkeys(group.claim for group in ordered.gathered.groups if group.claim))


def _some(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values[:5])) + (f" and {len(values) - 5} more" if len(values) > 5 else "")


def _alerts(ordered: Ordered) -> list[str]:
    """What a reader must know before believing the rest."""
    statuses, alerts = Counter(run.status for run in ordered.runs), []
    for status in ("diverged", "failed", "interrupted", "running"):
        if statuses[status]:
            one = statuses[status] == 1
            verb = {"interrupted": "was " if one else "were ", "running": "is still " if one else "are still "}
            alerts.append(f"{_runs_of(statuses[status])} {verb.get(status, '')}{status}.")
    waiting = sum(group.waiting for group in ordered.gathered.groups)
    if waiting:
        alerts.append(f"{_runs_of(waiting)} {'have' if waiting > 1 else 'has'} not begun.")
    single = sum(len(run.records) <= 1 for run in ordered.runs)
    if single:
        alerts.append(f"{_runs_of(single)} with one evaluation at most: a point, not a curve.")
    if ordered.repeated:
        alerts.append(f"{_runs_of(ordered.repeated)} left out: the same experiment as another.")
    return alerts


def _runs_of(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"


def _intervals(ordered: Ordered) -> str:
    if ordered.seeds == 1:
        return "One seed each: differences carry no confidence interval."
    return "Small print under a number: 95 % bootstrap interval of the mean over seeds."


def _runs(ordered: Ordered) -> list[dict[str, Any]]:
    return [
        {
            "folder": str(run.folder), "name": run.name, "what": ordered.tell_run(cell, run), "seed": run.seed,
            "status": run.status, "error": run.error or "", "bad": not run.well, "evaluations": len(run.records),
            "rounds": f"{int(run.columns['round'][-1]) if run.records else 0} of {run.experiment.get('rounds', '?')}",
        }
        for cell in ordered.cells for run in cell.runs
    ]


def _commands(ordered: Ordered) -> list[str]:
    """What makes these runs again."""
    commands = [group.command for group in ordered.gathered.groups if group.command]
    lone = [run for run in ordered.runs if run.group is None or not run.group.command]
    commands += [f"dbo run {shlex.quote(str(run.folder / 'experiment.yaml'))}" for run in lone[:4]]
    return commands + ([f"# and {len(lone) - 4} more experiment.yaml"] if len(lone) > 4 else [])
