"""The dashboard, the alerts and the page on monitoring name only metrics that exist, and the page names them all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.telemetry.families import Counts, Family, Gauge, Histogram
from proxy.telemetry.metrics import Metrics
from tests.docs.test_links import anchors
from tests.promql import OF_PROMETHEUS, uses

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "monitoring.md"
DASHBOARD = ROOT / "docker" / "grafana" / "tokengrove.json"
PROMETHEUS = ROOT / "docker" / "prometheus"
TYPES: dict[type[Family], str] = {Counts: "counter", Gauge: "gauge", Histogram: "histogram"}
UP = {"up": frozenset[str]()}
"""What Prometheus says of a target."""


def shown_name(family: Family) -> str:
    return f"{family.name}_total" if isinstance(family, Counts) else family.name


def series() -> dict[str, frozenset[str]]:
    """The labels of every series, by its name."""
    found = dict(UP)
    for family in Metrics().families:
        labels = frozenset(family.labels)
        if isinstance(family, Histogram):
            found |= {f"{family.name}_bucket": labels | {"le"}, f"{family.name}_sum": labels}
            found[f"{family.name}_count"] = labels
        else:
            found[shown_name(family)] = labels
    return found


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def queries() -> Iterator[tuple[str, str]]:
    """The expressions of the panels, as Grafana sends them, by the title of the panel."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], re.sub(r"\$(__rate_interval|__interval)", "5m", target["expr"])


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


EXPRESSIONS = [*queries(), *((rule["alert"], rule["expr"]) for rule in rules())]


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS, ids=lambda value: str(value)[:60])
def test_an_expression_uses_series_and_labels_that_there_are(title: str, expression: str) -> None:
    known, grouped, at_hand = series(), set[str](), set(OF_PROMETHEUS)
    for name, labels in uses(expression):
        if name:
            assert name in known, f"{title}: there is no series {name}"
            assert labels <= known[name] | OF_PROMETHEUS, f"{title}: {name} has no label {labels - known[name]}"
            at_hand |= known[name]
        else:
            grouped |= labels
    assert grouped <= at_hand, f"{title}: no series has the label {grouped - at_hand}"


@pytest.mark.parametrize("title", sorted({title for title, _ in queries()}))
def test_a_panel_shows_one_server_or_all_as_the_reader_chooses(title: str) -> None:
    for name, expression in queries():
        if name == title:
            chosen = [labels for metric, labels in uses(expression) if metric]
            assert chosen and all(labels >= OF_PROMETHEUS for labels in chosen)


def documented() -> list[tuple[str, str, str, str]]:
    """The rows of the tables of metrics: name, type, labels and meaning."""
    row = re.compile(r"^\| `((?:tokengrove|process)_\w+)` \| (counter|gauge|histogram) \| (.*?) ?\| (.+) \|$", re.M)
    return row.findall(PAGE.read_text())


def test_the_page_has_a_row_for_each_metric_with_its_type_its_labels_and_what_it_means() -> None:
    found = [(name, kind, tuple(re.findall(r"`([a-z]+)`", labels)), text) for name, kind, labels, text in documented()]
    assert found == [
        (shown_name(family), TYPES[type(family)], family.labels, family.text) for family in Metrics().families
    ]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_pages_name_only_metrics_that_there_are(page: Path) -> None:
    known = series().keys() | {shown_name(family) for family in Metrics().families}
    named = set(re.findall(r"`((?:tokengrove_|process_)[a-z_]+)(?:\{[^`]*\})?`", page.read_text()))
    assert {name for name in named if name not in known} <= {"process_"}


def test_each_alert_has_a_severity_a_time_and_says_what_to_do_and_where_more_is_said() -> None:
    found, headings = rules(), anchors(PAGE)
    assert len({rule["alert"] for rule in found}) == len(found)
    for rule in found:
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert re.fullmatch(r"\d+[sm]", rule["for"]), rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]
        anchor = re.search(r"docs/monitoring\.md#([\w-]+)\.$", rule["annotations"]["description"])
        assert anchor is not None and anchor[1] in headings, rule["alert"]


def test_the_page_lists_the_alerts() -> None:
    rows = re.findall(r"^\| `(Tokengrove\w+)` \| (\w+) \| (\w+) \| .+ \|$", PAGE.read_text(), re.M)
    assert rows == [(rule["alert"], rule["labels"]["severity"], rule["for"]) for rule in rules()]


def test_the_dashboard_can_be_imported_anywhere() -> None:
    found = dashboard()
    variables = {variable["name"]: variable for variable in found["templating"]["list"]}
    assert found["id"] is None and variables["datasource"]["type"] == "datasource"
    panels = [panel for panel in found["panels"] if panel["type"] != "row"]
    sources = [panel["datasource"] for panel in panels] + [
        t["datasource"] for panel in panels for t in panel["targets"]
    ]
    sources += [variable["datasource"] for variable in variables.values() if variable["type"] == "query"]
    assert sources and all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    for variable in variables.values():
        if variable["type"] == "query":
            metric = re.match(r"label_values\((\w+)", variable["definition"])
            assert metric is not None and metric[1] in series()


def test_the_panels_of_the_dashboard_have_their_own_place_a_unit_and_a_description() -> None:
    panels, taken = dashboard()["panels"], dict[tuple[int, int], str]()
    assert len({panel["id"] for panel in panels}) == len(panels)
    titles = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert titles == ["Overview", "Turns", "HTTP", "Engine", "Sessions and training queue", "Store", "Process"]
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24, panel["title"]
        for cell in (
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ):
            assert cell not in taken, f"{panel['title']} lies on {taken[cell]}"
            taken[cell] = panel["title"]
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"] and panel["description"], panel["title"]
            references = [target["refId"] for target in panel["targets"]]
            assert len(set(references)) == len(references) > 0


def test_prometheus_reads_the_rules_that_lie_beside_its_configuration() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert all((PROMETHEUS / name).is_file() for name in config["rule_files"])
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    assert all(f'job="{job}"' in rule["expr"] for rule in rules() for job in jobs)
