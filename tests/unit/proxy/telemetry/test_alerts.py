"""Each alert fires when it should and is silent on a healthy server, as Prometheus' own tool evaluates the rules."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[4]
PROMETHEUS = ROOT / "docker" / "prometheus"
ME = 'job="tokengrove", instance="a:8080"'
SERVED = f'tokengrove_http_requests_total{{{ME}, method="POST", route="/v1/chat/completions", status="200"}}'
TURNS = f'tokengrove_turns_total{{{ME}, api="chat", status="complete"}}'

Series = Mapping[str, str]
"""By series its values, a minute apart, in promtool's notation: `start+step x times`."""


def histogram(name: str, bounds: tuple[str, str, str], *, slow: bool, labels: str = "") -> Series:
    """A histogram that grows by 60 values a minute: all in the first bucket, or all in the second."""
    low, high, _ = bounds
    grown = {low: "0x180" if slow else "0+60x180", high: "0+60x180", "+Inf": "0+60x180"}
    return {f'{name}_bucket{{{ME}{labels}, le="{bound}"}}': values for bound, values in grown.items()}


COMMIT = ', phase="commit"'
HEALTHY: Series = {
    f"up{{{ME}}}": "1x180",
    f"process_start_time_seconds{{{ME}}}": "1000x180",
    f"process_open_fds{{{ME}}}": "100x180",
    f"process_max_fds{{{ME}}}": "1000x180",
    f"process_resident_memory_bytes{{{ME}}}": "3e9x180",
    f"tokengrove_processes{{{ME}}}": "4x180",
    f'tokengrove_engine_servers{{{ME}, state="alive"}}': "2x180",
    f'tokengrove_engine_server_up{{{ME}, server="http://e:1"}}': "1x180",
    f'tokengrove_engine_server_up{{{ME}, server="http://e:2"}}': "1x180",
    f'tokengrove_engine_server_weight_version{{{ME}, server="http://e:1"}}': "7x180",
    f'tokengrove_engine_server_weight_version{{{ME}, server="http://e:2"}}': "7x180",
    f"tokengrove_engine_paused{{{ME}}}": "0x180",
    f"tokengrove_database_up{{{ME}}}": "1x180",
    f"tokengrove_refused_commits_total{{{ME}}}": "0x180",
    SERVED: "0+600x180",
    TURNS: "0+600x180",
    f'tokengrove_turns_total{{{ME}, api="chat", status="failed"}}': "0+1x180",
    f'tokengrove_stored_sessions{{{ME}, state="waiting"}}': "50x180",
    f'tokengrove_stored_sessions{{{ME}, state="leased"}}': "8x180",
    f"tokengrove_claim_wait_seconds{{{ME}}}": "20x180",
    **histogram("tokengrove_first_token_seconds", ("1.0", "60.0", "+Inf"), slow=False),
    **histogram("tokengrove_turn_phase_seconds", ("0.01", "5.0", "+Inf"), slow=False, labels=COMMIT),
    **histogram("tokengrove_loop_lag_seconds", ("0.01", "2.5", "+Inf"), slow=False),
}
WRONG: Mapping[str, Series] = {
    "TokengroveDown": {f"up{{{ME}}}": "0x180"},
    "TokengroveRestarting": {f"process_start_time_seconds{{{ME}}}": "1000+60x180"},
    "TokengroveWorkerMissing": {f"tokengrove_processes{{{ME}}}": "4x150 3x29"},
    "TokengroveNoEngineServer": {f'tokengrove_engine_servers{{{ME}, state="alive"}}': "0x180"},
    "TokengroveEngineServerDown": {f'tokengrove_engine_server_up{{{ME}, server="http://e:2"}}': "0x180"},
    "TokengroveWeightVersionsDiffer": {
        f'tokengrove_engine_server_weight_version{{{ME}, server="http://e:2"}}': "6x180"
    },
    "TokengroveMismatch": {f'tokengrove_mismatch_named{{{ME}, trainer="t", server="http://e:2"}}': "1x180"},
    "TokengroveEnginePaused": {f"tokengrove_engine_paused{{{ME}}}": "1x180"},
    "TokengroveDatabaseDown": {f"tokengrove_database_up{{{ME}}}": "0x180"},
    "TokengroveCommitsRefused": {f"tokengrove_refused_commits_total{{{ME}}}": "0+3x180"},
    "TokengroveCommitsSlow": histogram(
        "tokengrove_turn_phase_seconds", ("0.01", "5.0", "+Inf"), slow=True, labels=COMMIT
    ),
    "TokengroveServerErrors": {SERVED.replace("200", "503"): "0+60x180"},
    "TokengroveRefusals": {SERVED.replace("200", "429"): "0+300x180"},
    "TokengroveTurnsFail": {f'tokengrove_turns_total{{{ME}, api="chat", status="failed"}}': "0+60x180"},
    "TokengroveFirstTokenSlow": histogram("tokengrove_first_token_seconds", ("1.0", "60.0", "+Inf"), slow=True),
    "TokengroveLoopLag": histogram("tokengrove_loop_lag_seconds", ("0.01", "2.5", "+Inf"), slow=True),
    "TokengroveClaimBacklogGrows": {
        f'tokengrove_stored_sessions{{{ME}, state="waiting"}}': "50+10x180",
        f"tokengrove_claim_wait_seconds{{{ME}}}": "20+60x180",
    },
    "TokengroveFilesRunOut": {f"process_open_fds{{{ME}}}": "950x180"},
    "TokengroveMemoryGrows": {f"process_resident_memory_bytes{{{ME}}}": "3e9x90 3.1e9+1e8x89"},
}
"""By alert the series that are otherwise than on a healthy server."""


def alerts() -> list[str]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule["alert"] for group in groups for rule in group["rules"]]


def case(series: Series, firing: list[str]) -> dict[str, Any]:
    """A test of promtool: which alerts fire nearly three hours after these series began."""
    given = [{"series": name, "values": values} for name, values in series.items()]
    query = 'count by (alertname) (ALERTS{alertstate="firing"})'
    wanted = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing]
    check = {"expr": query, "eval_time": "175m", "exp_samples": wanted}
    return {"interval": "1m", "input_series": given, "promql_expr_test": [check]}


def test_every_alert_has_a_case() -> None:
    assert alerts() == [*WRONG]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, which comes with Prometheus")
def test_each_alert_fires_when_it_should_and_none_fires_on_a_healthy_server(tmp_path: Path) -> None:
    cases = [case(HEALTHY, []), *(case({**HEALTHY, **wrong}, [name]) for name, wrong in WRONG.items())]
    file, given = tmp_path / "alerts_test.yml", {"rule_files": [str(PROMETHEUS / "alerts.yml")], "tests": cases}
    file.write_text(yaml.safe_dump({**given, "evaluation_interval": "5m"}))
    tested = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, which comes with Prometheus")
def test_prometheus_takes_its_configuration() -> None:
    command = ["promtool", "check", "config", "--syntax-only", str(PROMETHEUS / "prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
