"""deploy/: manifests parse and ask for what the server has; rules and dashboard name metrics that exist."""

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase
from servax.server.config import ServeConfig
from servax.server.http.asgi import create_app
from servax.server.metrics import Metrics

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
MANIFESTS = ("kubernetes.yaml", "inference_service.yaml", "autoscaling.yaml")
# Labels that Prometheus adds, and that histograms have.
ADDED = {"instance", "job", "le"}
RECORD = re.compile(r"servax:[\w:]+")
SELECTOR = re.compile(r"(servax_\w+)(?:\{([^}]*)\})?")
LABELS = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
BY = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def exported() -> dict[str, set[str]]:
    """Label names by the name of each sample that /metrics gives once everything was counted."""
    metrics = Metrics()
    for metric in [*vars(metrics).values(), *vars(metrics._batches).values()]:
        if isinstance(metric, MetricWrapperBase) and metric._labelnames:
            metric.labels(*metric._labelnames)
    samples = itertools.chain.from_iterable(family.samples for family in metrics.registry.collect())
    names: dict[str, set[str]] = {}
    for sample in samples:
        names.setdefault(sample.name, set()).update(sample.labels)
    return names


def expressions() -> Iterator[tuple[str, str]]:
    for group in documents("alerts.yml")[0]["groups"]:
        for rule in group["rules"]:
            yield f"alerts.yml {rule.get('alert', rule.get('record'))}", rule["expr"]
    for trigger in documents("autoscaling.yaml")[0]["spec"]["triggers"]:
        yield "autoscaling.yaml", trigger["metadata"]["query"]
    board = json.loads((DEPLOY / "grafana.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield f"grafana.json {panel['title']}", target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield "grafana.json variable", variable["query"]


def test_every_metric_and_label_that_is_asked_for_exists() -> None:
    known = exported()
    recorded = {
        rule["record"]: set().union(*map(str.split, BY.findall(rule["expr"].replace(",", " "))))
        for group in documents("alerts.yml")[0]["groups"]
        for rule in group["rules"]
        if "record" in rule
    }
    seen = 0
    for where, text in expressions():
        found = [(name, labels) for name, labels in SELECTOR.findall(text)]
        for name, labels in found:
            assert name in known, f"{where} asks for {name}, which /metrics does not have"
            extra = set(LABELS.findall(labels)) - known[name] - ADDED
            assert not extra, f"{where} asks for {name} by {extra}; it has {known[name]}"
        for record in RECORD.findall(text):
            assert record in recorded, f"{where} asks for {record}, which no rule records"
        allowed = ADDED.union(*(known[name] for name, _ in found))
        for group in BY.findall(text):
            extra = {label.strip() for label in group.split(",")} - allowed
            assert not extra, f"{where} groups by {extra}"
        seen += len(found)
    assert seen > 30


def test_alerts_say_what_to_do() -> None:
    for group in documents("alerts.yml")[0]["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                assert rule["labels"]["severity"] in ("critical", "warning", "info")
                assert set(rule["annotations"]) == {"summary", "action"}


def containers() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each pod's spec with its container."""
    for name in MANIFESTS:
        for one in documents(name):
            spec = one["spec"]
            pod = spec["template"]["spec"] if one["kind"] == "Deployment" else spec.get("predictor")
            if pod is not None:
                yield pod, pod["containers"][0]


def test_probes_ask_for_paths_that_are_served() -> None:
    from servax.server.fake import FakeEngine

    paths = set(create_app(FakeEngine()).openapi()["paths"])
    pods = list(containers())
    assert len(pods) == 2
    for _, container in pods:
        asked = {
            kind: container[f"{kind}Probe"]["httpGet"]["path"]
            for kind in ("startup", "readiness", "liveness")
        }
        assert set(asked.values()) <= paths
        assert asked["readiness"] == "/v2/health/ready"
        assert asked["liveness"] == "/v2/health/live"
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        port = container["readinessProbe"]["httpGet"]["port"]
        assert ports.get(port, port) == ServeConfig().port


def test_a_pod_has_the_time_that_its_drain_takes() -> None:
    for pod, container in containers():
        before = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] >= before + ServeConfig().drain_s + 5
        assert pod["enableServiceLinks"] is False


@pytest.mark.parametrize("command", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_rules_pass_promtool(command: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    done = subprocess.run([promtool, *command], cwd=DEPLOY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
