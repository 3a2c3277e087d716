"""The Grafana boards: well formed, with queries only for metrics that the engine exports, with bounded labels.

tests/platform/cli/test_submit.py checks that a real run serves these metrics at the Prometheus endpoint.
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
NODE_METRICS = {f"ray_{name}" for name in prometheus.NODE_GAUGES}


def list_expressions(board: dict[str, Any]) -> Iterator[str]:
    yield from (target["expr"] for panel in board["panels"] for target in panel["targets"])


def find_metrics(expression: str) -> set[str]:
    """Return the metrics that an expression selects: names before a brace."""
    return set(re.findall(r"([a-zA-Z_:][\w:]*)\s*\{", expression))


@pytest.fixture(params=BOARDS, ids=lambda path: path.stem)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(request.param.read_text())
    return loaded


def test_boards_of_runs_and_nodes_exist() -> None:
    """Each has its own address."""
    assert [path.stem for path in BOARDS] == ["dbo-nodes", "dbo-runs"]
    assert [json.loads(path.read_text())["uid"] for path in BOARDS] == ["dbo-nodes", "dbo-runs"]


def test_every_panel_queries_the_chosen_data_source_and_has_a_description(board: dict[str, Any]) -> None:
    """Panels have unique ids, a title, a description and queries, and do not overlap on the grid."""
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 0
    assert board["templating"]["list"][0] | {"label": ""} == {
        "name": "datasource", "label": "", "type": "datasource", "query": "prometheus", "current": {}, "refresh": 1,
        "options": [],
    }
    covered: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        assert panel["description"]
        assert panel["targets"]
        for queried in (panel, *panel["targets"]):
            assert queried["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & covered
        assert max(x for x, _ in cells) < 24
        covered |= cells


def test_boards_query_exported_metrics_with_bounded_labels(board: dict[str, Any]) -> None:
    """Every query selects a metric of engine/prometheus.py, and filters and groups by run, algorithm and node only."""
    for expression in list_expressions(board):
        assert find_metrics(expression), expression
        assert find_metrics(expression) <= EXPORTED, expression
        assert expression.count("(") == expression.count(")")
        labels = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        for name, selector in re.findall(r"(\w+)\s*\{([^}]*)\}", expression):
            assert selector == 'run=~"$run", algorithm=~"$algorithm"'
            assert labels == {*prometheus.LABELS} | ({"node"} if name in NODE_METRICS else set())


def test_every_exported_metric_is_on_a_board() -> None:
    """A metric that no board shows need not be exported."""
    queries = [query for path in BOARDS for query in list_expressions(json.loads(path.read_text()))]
    assert set().union(*map(find_metrics, queries)) == EXPORTED


def test_links_and_variables_are_valid(board: dict[str, Any]) -> None:
    """Boards link to each other; the lists of runs and algorithms come from a metric that every run exports."""
    assert {link["url"] for link in board["links"]} <= {f"/d/{path.stem}" for path in BOARDS}
    for variable in board["templating"]["list"][1:]:
        query = f"label_values(ray_dbo_round, {variable['name']})"
        assert variable["definition"] == variable["query"]["query"] == query


def test_alerts_and_provisioning_fit_the_boards() -> None:
    """Alerts query exported metrics; the data source has the name that Ray's boards expect; boards are mounted."""
    rules = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == ["RunLostProcesses", "RunStandsStill"]
    for rule in rules:
        assert find_metrics(rule["expr"])
        assert find_metrics(rule["expr"]) <= EXPORTED
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/dbo.yaml").read_text())["datasources"][0]
    assert (source["type"], source["uid"]) == ("prometheus", "Prometheus")
    compose = yaml.safe_load((GRAFANA.parents[1] / "docs/deploy/grafana.yaml").read_text())["services"]
    mounts = [mount.split(":") for service in compose.values() for mount in service["volumes"]]
    inside = {target for _, target, _ in mounts}
    for provider in yaml.safe_load((GRAFANA / "provisioning/dashboards/dbo.yaml").read_text())["providers"]:
        assert any(Path(provider["options"]["path"]).is_relative_to(place) for place in inside)
    for source_path, _, mode in mounts:
        assert mode == "ro"
        assert source_path == "/tmp/ray" or (GRAFANA.parents[1] / "docs/deploy" / source_path).exists()
