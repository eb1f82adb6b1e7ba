"""What deploy/monitoring asks for is what the engine tells."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures.scripted_engine import NO_PAUSE, STATE

from ebbtide.srt.entrypoints.metrics.operations import OPERATIONS, reasons
from ebbtide.srt.entrypoints.metrics.prometheus import Metrics

FOLDER = Path(__file__).parents[4] / "deploy" / "monitoring"
NAME = re.compile(r"\bebbtide[:_]\w+")
# Families that have no sample before the first event of their kind, but their name and help.
SUFFIXES = ("_bucket", "_total", "_count", "_sum", "")


def expressions() -> list[str]:
    dashboard: Any = json.loads((FOLDER / "grafana_dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found += [note["expr"] for note in dashboard["annotations"]["list"]]
    found += [
        entry["query"]["query"] for entry in dashboard["templating"]["list"] if entry["type"] == "query"
    ]
    rules: Any = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    return found + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_and_label_value_of_an_expression_exists(expression: str) -> None:
    text = Metrics("0").text(STATE, [], NO_PAUSE).decode()
    families = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    names = NAME.findall(expression)
    assert names
    for name in names:
        assert any(name.removesuffix(suffix) in families or name in families for suffix in SUFFIXES), name
    for operation in re.findall(r'operation="(\w+)"', expression):
        assert operation in OPERATIONS.values()
    for pattern in re.findall(r'reason=~"([^"]+)"', expression):
        assert any(re.fullmatch(pattern, reason) for reason in reasons(STATE))
    for quantile, buckets in re.findall(r"histogram_quantile\(([\d.]+), .*?(\w+_bucket)", expression):
        assert 0 < float(quantile) < 1, buckets


def test_the_page_on_operations_names_every_metric() -> None:
    page = (FOLDER.parents[1] / "docs" / "operations.md").read_text(encoding="utf-8")
    text = Metrics("0").text(STATE, [], NO_PAUSE).decode()
    families = re.findall(r"^# TYPE ebbtide[:_](\S+?)(?:_total)? ", text, re.MULTILINE)
    assert len(families) > 40
    named = {word.removesuffix("_total") for word in re.findall(r"\w+", page.replace("ebbtide_", ""))}
    assert [name for name in families if name not in named and not name.endswith("_created")] == []


def test_every_alert_says_what_to_do() -> None:
    rules: Any = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        assert rule["annotations"]["remedy"]
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert "instance" in rule["expr"] or re.fullmatch(r"\S+ == 1", rule["expr"])
