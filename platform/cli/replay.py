"""`dbo replay`: time to the target on other networks, from recorded traffic."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dbo.platform.cli.console import Folders, console, print_line, warn
from dbo.platform.errors import InputError

if TYPE_CHECKING:
    from dbo.dashboards.groups import GroupedRuns
    from dbo.dashboards.replay import Replay, ReplayedGroup
    from dbo.platform.network.timing import Profile


def replay_runs(
    folders: Folders,
    network: Annotated[list[str] | None, typer.Option(
        "--network", metavar="NAME|FILE", help="Profile by name, YAML file or CSV trace; repeat it for several. "
                                               "Default: all shipped profiles.")] = None,
    target: Annotated[str | None, typer.Option(
        "--target", metavar="METRIC=LEVEL", help="Target; default: the comparison's own.")] = None,
    out: Annotated[Path | None, typer.Option(
        "--out", metavar="FILE.csv", help="Also write the time of every evaluation on every network.")] = None,
) -> None:
    """Show how long recorded runs take to reach the target on other networks.

    Synchronous runs have the same trajectory on every network; only the clock differs. Nothing is trained again.
    """
    from dbo.dashboards.groups import group_runs
    from dbo.dashboards.load import load_runs
    from dbo.dashboards.replay import load_networks, read_all, replay_groups
    from dbo.platform.runs.schema import Target

    if out is not None and (out.is_dir() or out.suffix != ".csv"):
        raise InputError(f"--out: {out} is not allowed; must be a .csv file")
    networks = load_networks(network or [])
    runs = group_runs(load_runs(folders, Target.parse(target) if target else None))
    replay = read_all(runs)
    if not replay.traffic and len(replay.missing) == 1:
        raise InputError(replay.missing[0])
    for text in replay.missing:
        warn(f"left out: {text}")
    if not replay.traffic:
        raise InputError(f"{folders[0]}: no run has recorded traffic")
    if replay.estimated:
        warn(f"{replay.estimated} of {len(replay.traffic)} runs have no computing times; "
             f"training time divided by the number of nodes is used instead")
    _print_tables(runs, replay_groups(replay, networks), list(networks))
    if out is not None:
        _write_times(replay, networks, out)
        print_line(f"times: {out}")


def _print_tables(runs: "GroupedRuns", replayed: "list[ReplayedGroup]", networks: list[str]) -> None:
    """Print a table per setting: a row per group, a column per network, the fastest in bold."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    for setting in runs.settings:
        rows = [one for one in replayed if one.group.setting == setting]
        fastest = {
            name: min((estimate.mean for row in rows if (estimate := row.times[name]) is not None), default=None)
            for name in networks
        }
        title = f"seconds to {setting.target}" + (f" · {runs.label_setting(setting)}" if len(runs.settings) > 1 else "")
        print_line(title)
        table = Table(box=box.SIMPLE)
        table.add_column("algorithm")
        for name in networks:
            table.add_column(escape(name), justify="right")
        for row in rows:
            table.add_row(escape(runs.label_in_setting(row.group)), *(
                _format_time(row, name, fastest[name]) for name in networks))
        console.print(table)


def _format_time(row: "ReplayedGroup", name: str, fastest: float | None) -> str:
    estimate = row.times[name]
    if estimate is None:
        return "not reached"
    seeds = len(row.group.runs)
    text = f"{estimate.mean:,.3g}" if estimate.mean < 1000 else f"{estimate.mean:,.0f}"
    text += f" ({estimate.count} of {seeds})" if estimate.count < seeds else ""
    return f"[bold]{text}[/bold]" if estimate.mean == fastest else text


def _write_times(replay: "Replay", networks: "dict[str, Profile]", out: Path) -> None:
    """Write a row per run, network and evaluation."""
    import pandas as pd

    parts = [
        pd.DataFrame({
            "run": str(run.folder), "algorithm": run.algorithm, "seed": run.seed, "network": name,
            "round": [record["round"] for record in traffic.records], "network_seconds": traffic.replay(profile),
            run.target.metric: [record.get(run.target.metric) for record in traffic.records],
        })
        for run in replay.runs.runs if (traffic := replay.traffic.get(run.folder)) is not None
        for name, profile in networks.items()
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    pd.concat(parts).to_csv(out, index=False)
