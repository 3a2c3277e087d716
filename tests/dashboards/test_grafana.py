"""The Grafana boards: well formed, and asking only for metrics that the engine exports, with bounded labels.

That these metrics are at the Prometheus endpoint of a real run is seen in tests/platform/cli/test_submit.py.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dbo.platform.engine import prometheus

GRAFANA = Path(__file__).resolve().parents[2] / "dashboards" / "grafana"
BOARDS = sorted(GRAFANA.glob("*.json"))
EXPORTED = {f"ray_{name}" for name in (*prometheus.GAUGES, *prometheus.COUNTERS, *prometheus.NODE_GAUGES)}
OF_NODES = {f"ray_{name}" for name in prometheus.NODE_GAUGES}


def expressions(board: dict[str, Any]) -> Iterator[str]:
    yield from (target["expr"] for panel in board["panels"] for target in panel["targets"])


def metrics(expression: str) -> set[str]:
    """The metrics that an expression selects: names before a brace."""
    return set(re.findall(r"([a-zA-Z_:][\w:]*)\s*\{", expression))


@pytest.fixture(params=BOARDS, ids=lambda path: path.stem)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(request.param.read_text())
    return loaded


def test_there_are_boards() -> None:
    """One of runs, one of nodes; each with an address of its own."""
    assert [path.stem for path in BOARDS] == ["dbo-nodes", "dbo-runs"]
    assert [json.loads(path.read_text())["uid"] for path in BOARDS] == ["dbo-nodes", "dbo-runs"]


def test_every_panel_asks_the_chosen_data_source_and_says_what_it_shows(board: dict[str, Any]) -> None:
    """Panels have ids of their own, a title, a description, queries, and lie beside each other on the grid."""
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 0
    assert board["templating"]["list"][0] | {"label": ""} == {
        "name": "datasource", "label": "", "type": "datasource", "query": "prometheus", "current": {}, "refresh": 1,
        "options": [],
    }
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        assert panel["description"]
        assert panel["targets"]
        for asking in (panel, *panel["targets"]):
            assert asking["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_boards_ask_for_exported_metrics_and_bounded_labels(board: dict[str, Any]) -> None:
    """Every query names a metric of platform/meters.py and filters and groups by run, algorithm and node only."""
    for expression in expressions(board):
        assert metrics(expression), expression
        assert metrics(expression) <= EXPORTED, expression
        assert expression.count("(") == expression.count(")")
        labels = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        for name, selector in re.findall(r"(\w+)\s*\{([^}]*)\}", expression):
            assert selector == 'run=~"$run", algorithm=~"$algorithm"'
            assert labels == {*prometheus.LABELS} | ({"node"} if name in OF_NODES else set())


def test_every_exported_metric_is_on_a_board() -> None:
    """What is exported is looked at; what nobody looks at need not be exported."""
    shown = {name for path in BOARDS for e in expressions(json.loads(path.read_text())) for name in metrics(e)}
    assert shown == EXPORTED


def test_links_and_variables_lead_somewhere(board: dict[str, Any]) -> None:
    """Boards link to each other, and the choices of runs and algorithms come from a metric that is always there."""
    assert {link["url"] for link in board["links"]} <= {f"/d/{path.stem}" for path in BOARDS}
    for variable in board["templating"]["list"][1:]:
        asked = f"label_values(ray_dbo_round, {variable['name']})"
        assert variable["definition"] == variable["query"]["query"] == asked


def test_alerts_and_provisioning_fit_the_boards() -> None:
    """Alerts ask for exported metrics; the data source has the name that Ray's boards expect; boards are mounted."""
    rules = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == ["RunLostProcesses", "RunStandsStill"]
    for rule in rules:
        assert metrics(rule["expr"])
        assert metrics(rule["expr"]) <= EXPORTED
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/dbo.yaml").read_text())["datasources"][0]
    assert (source["type"], source["uid"]) == ("prometheus", "Prometheus")
    compose = yaml.safe_load((GRAFANA.parents[1] / "docs/grafana-compose.yaml").read_text())["services"]
    mounts = [mount.split(":") for service in compose.values() for mount in service["volumes"]]
    inside = {target for _, target, _ in mounts}
    for provider in yaml.safe_load((GRAFANA / "provisioning/dashboards/dbo.yaml").read_text())["providers"]:
        assert any(Path(provider["options"]["path"]).is_relative_to(place) for place in inside)
    for source_path, _, mode in mounts:
        assert mode == "ro"
        assert source_path == "/tmp/ray" or (GRAFANA.parents[1] / "docs" / source_path).exists()
