"""monitoring/ asks for metrics and labels that the service and the sinks really have, where they really are.

Nothing is told by a query of a name that does not exist: it is an alert that never fires.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from outbox.audit import monitor
from outbox.audit.monitor import Monitor
from outbox.audit.report import ComparisonReport, Report, SinkReport, TopicReport
from outbox.base.settings import load
from outbox.sink.running.metrics import Lag, Metrics, State
from outbox.sink.writer import Counts
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from service.app import create_app
from template.tests import dockerfile
from template.tests.paths import ROOT

FOLDER = ROOT / "monitoring"
SCRAPED: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana" / "dashboard.json").read_text())
SERVICES: dict[str, Any] = {
    name: service
    for file in ("docker-compose.yml", "docker-compose.monitoring.yml")
    for name, service in yaml.safe_load((ROOT / file).read_text())["services"].items()
}

PROBES = {"/healthz", "/readyz", "/metrics"}
# What Prometheus adds by itself.
OWN_METRICS, OWN_LABELS = {"up"}, {"job", "instance"}
OPERATORS = {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring", "group_left", "group_right"}
GROUPING = r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)"


# What is asked for ------------------------------------------------------------------------------------------------


def queries() -> Iterator[tuple[str, str]]:
    """Each PromQL expression, with where it is from."""
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        values = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert values is not None
        yield f"${variable['name']}", f"sum by ({values[2]}) ({values[1]})"


def texts() -> Iterator[str]:
    """Each text that labels are filled into: {{ $labels.sink }} in an alert, {{sink}} in a legend."""
    for rule in RULES:
        yield from rule["annotations"].values()
    for panel in DASHBOARD["panels"]:
        yield from (target["legendFormat"] for target in panel.get("targets", []))


def names(query: str) -> set[str]:
    """The metrics that a query asks for."""
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]', "", query)
    bare = re.sub(GROUPING, "", re.sub(r"\{[^}]*\}", "", bare))
    found = re.findall(r"(?<![\w.:])([a-zA-Z_:][\w:]*)(?!\s*\(|[\w:])", bare)
    return set(found) - OPERATORS


def labels(query: str) -> set[str]:
    """The labels that a query selects or groups by."""
    groups = ",".join(re.findall(GROUPING, query))
    matchers = ",".join(re.findall(r"\{([^}]*)\}", query))
    return set(re.findall(r"\w+", groups)) | set(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', matchers))


# What there is ----------------------------------------------------------------------------------------------------


def exposed_by_the_sinks() -> str:
    metrics = Metrics()
    metrics.now("a", State.RUNNING)
    metrics.started("a", {"t": {0: 0}})
    metrics.applied("a", Counts(rows=1), {"t": {0: 1}}, read_s=0.1, apply_s=0.1)
    metrics.collect_lag(lambda _: {"a": Lag({"t": {0: 1}}, 1.0)})
    return generate_latest(metrics.registry).decode()


def exposed_by_the_service() -> str:
    app = create_app(load(Path("/nonexistent"), environment=False, service_token="secret"))
    app.test_client().get("/healthz")
    return app.test_client().get("/metrics").text


def exposed_by_the_monitor() -> str:
    asked = ("outbox_slot_", "outbox_dead_letters", "outbox_connector_")
    samples: list[tuple[str, float, Sequence[str]]] = [
        (name, 1.0, ["a"]) for name in monitor.METRICS if name.startswith(asked)
    ]
    collector = Monitor({"all": lambda: samples})
    compared = SinkReport("a", comparisons=[ComparisonReport("b")])
    assert collector.check(lambda: Report(topics=[TopicReport("t")], sinks=[compared])) is None
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


@cache
def exposed() -> dict[str, set[str]]:
    """By name of each sample, as Prometheus stores it, its labels."""
    return {
        sample.name: set(sample.labels) | OWN_LABELS
        for text in (exposed_by_the_sinks(), exposed_by_the_service(), exposed_by_the_monitor())
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# What is asked for is there ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "query"), [*queries()])
def test_every_metric_and_label_that_is_asked_for_exists(where: str, query: str) -> None:
    asked = names(query)
    assert asked
    assert asked <= set(exposed()) | OWN_METRICS
    has: set[str] = set().union(*(exposed().get(name, OWN_LABELS) for name in asked))
    assert labels(query) <= has


def test_every_label_that_a_text_is_filled_with_exists() -> None:
    known = set().union(*exposed().values())
    for text in texts():
        used = re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text)
        assert set(used) <= known, text


def test_every_metric_of_ours_is_looked_at() -> None:
    families = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in exposed() if name.startswith("outbox_")}
    families -= {name.removesuffix("_total") for name in families if name.endswith("_total")}  # of its _created
    assert monitor.METRICS.keys() < families
    asked = set().union(*(names(query) for _, query in queries()))
    assert all(any(name.startswith(family) for name in asked) for family in families)


def test_every_job_that_is_asked_for_is_scraped() -> None:
    jobs = {job["job_name"] for job in SCRAPED["scrape_configs"]}
    asked = {job for _, query in queries() for job in re.findall(r'job="(\w+)"', query)}
    assert asked == jobs


def test_an_alert_on_requests_looks_at_every_route_but_the_probes() -> None:
    # Probes would make a failing service look better, and an idle one look busy.
    app = create_app(load(Path("/nonexistent"), environment=False, service_token="secret"))
    routes = {rule.rule for rule in app.url_map.iter_rules()}
    selected = [found for rule in RULES for found in re.findall(r"http_request_\w+(\{[^}]*\})?", rule["expr"])]
    assert len(selected) > 2
    for selector in selected:
        left_out = re.findall(r'route!~"([^"]*)"', selector)
        assert not re.search(r'route=~?"', selector)
        assert {route for route in routes if left_out and re.fullmatch(left_out[0], route)} == PROBES


# It is wired ------------------------------------------------------------------------------------------------------


def test_an_alert_says_how_bad_it_is_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in {"page", "ticket", "info"}
        assert rule["annotations"].keys() == {"summary", "description"}


def port(address: str) -> str:
    return address.rpartition(":")[2]


def test_what_is_scraped_is_where_compose_runs_it() -> None:
    targets = {
        job["job_name"]: {tuple(target.split(":")) for config in job["static_configs"] for target in config["targets"]}
        | {(name, str(config["port"])) for config in job.get("dns_sd_configs", []) for name in config["names"]}
        for job in SCRAPED["scrape_configs"]
    }
    assert targets == {
        "monitor": {("monitor", port(SERVICES["monitor"]["command"][-1]))},
        "service": {("serve", port(SERVICES["serve"]["environment"]["OUTBOX_SERVICE_BIND"]))},
        "sinks": {
            (name, port(service["environment"]["OUTBOX_SINK_METRICS"]))
            for name, service in SERVICES.items()
            if runs_sinks(service)
        },
    }


def runs_sinks(service: Mapping[str, Any]) -> bool:
    """Whether its command is `python -m outbox sink`, or becomes that."""
    command = " ".join(service.get("command", []))
    return "-m outbox sink" in command or "-m outbox_lab.walkthrough.containers" in command


def test_the_files_are_copied_to_where_they_are_looked_for() -> None:
    stages = dockerfile.stages()
    copied = {where: file for name in ("prometheus", "grafana") for file, where in stages[name].our_files()}
    assert set(SCRAPED["rule_files"]) <= set(copied)
    [provider] = yaml.safe_load((FOLDER / "grafana" / "dashboards.yml").read_text())["providers"]
    dashboard = f"{provider['options']['path']}/outbox.json"
    assert copied[dashboard] == FOLDER / "grafana" / "dashboard.json"
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == dashboard
    assert {*copied.values()} == {file for file in FOLDER.rglob("*") if file.is_file()}
