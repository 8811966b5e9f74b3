"""Metrics: what is counted comes out, labels are bounded, and figures that are missing are no error."""

import dataclasses
import re
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.errors import ConfigError
from jaxllm.serving.server.job import Dispatch
from jaxllm.serving.server.metrics import Metrics, Names
from tests.serving.server.fake_figures import ENDED, FIGURES, STARTED


def values(metrics):
    """Sample name and labels -> value."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def used(snapshot=dict):
    """Metrics of a service that one call has used, and others that did not end well."""
    metrics = Metrics(snapshot)
    metrics.accepted("mail")
    metrics.started("mail", STARTED)
    metrics.dispatched(Dispatch(kind="decode", rows=3, took_ms=40.0, tokens=12))
    metrics.dispatched(Dispatch(kind="prefill", rows=1, took_ms=9.0, chunk_tokens=64, mode="int8"))
    metrics.ended("mail", ENDED)
    metrics.refused("mail", "full")
    metrics.failed("mail", "ContextGone")
    metrics.cancelled("mail")
    return metrics


def test_a_call_from_its_first_to_its_last_event():
    got, app = values(used()), ("app", "mail")
    assert got["jaxllm_calls_accepted_total", app] == 1
    assert got["jaxllm_calls_refused_total", app, ("reason", "full")] == 1
    assert got["jaxllm_calls_failed_total", app, ("kind", "ContextGone")] == 1
    assert got["jaxllm_calls_cancelled_total", app] == 1
    assert got["jaxllm_calls_ended_total", app, ("finish_reason", "stop")] == 1
    assert got["jaxllm_objectives_total", app, ("met", "true")] == 1
    assert got["jaxllm_plans_total", ("level", "70"), ("source", "proposed")] == 1
    assert got["jaxllm_prompt_tokens_total", app] == 120
    assert got["jaxllm_kept_tokens_total", app] == 96
    assert got["jaxllm_reused_tokens_total", app] == 64
    assert got["jaxllm_answer_tokens_total", app] == 21
    assert got["jaxllm_drafted_tokens_total", app] == 10
    assert got["jaxllm_ttft_seconds_sum", app] == pytest.approx(0.2)
    assert got["jaxllm_ttft_seconds_bucket", app, ("le", "0.2")] == 1
    assert got["jaxllm_ttft_seconds_bucket", app, ("le", "0.1")] == 0
    assert got["jaxllm_engine_ttft_seconds_sum", app] == pytest.approx(0.18)
    assert got["jaxllm_tpot_seconds_sum", app] == pytest.approx(0.03)
    assert got["jaxllm_queue_wait_seconds_sum", app] == pytest.approx(0.012)
    assert got["jaxllm_batch_rows_sum", ("kind", "decode")] == 3
    assert got["jaxllm_dispatch_seconds_sum", ("kind", "decode")] == pytest.approx(0.04)
    assert got["jaxllm_dispatched_tokens_total", ("kind", "decode")] == 12
    assert got["jaxllm_prefill_chunks_total", ("mode", "int8"), ("tokens", "64")] == 1
    assert not [key for key in got if key[0] == "jaxllm_prefill_chunks_total" and ("tokens", "0") in key]


def test_answers_without_objective_and_of_one_token():
    metrics = Metrics(dict)
    metrics.ended("mail", dataclasses.replace(ENDED, met=None, tokens=1))
    names = {key[0] for key in values(metrics)}
    assert "jaxllm_ttft_seconds_count" in names
    assert not names & {"jaxllm_objectives_total", "jaxllm_tpot_seconds_count"}


def test_figures_become_gauges():
    got = values(Metrics(lambda: FIGURES))
    assert got["jaxllm_queue_calls",] == 2
    assert got["jaxllm_queue_oldest_seconds",] == pytest.approx(0.084)
    assert got["jaxllm_running_calls", ("app", "mail"), ("level", "70")] == 2
    assert got["jaxllm_memory_bytes",] == 1710 << 20
    assert got["jaxllm_memory_limit_bytes",] == 2048 << 20
    assert got["jaxllm_holding_size_bytes", ("holding", "weights")] == 912 << 20
    assert got["jaxllm_holding_limit_bytes", ("holding", "contexts")] == 256 << 20
    assert ("jaxllm_holding_limit_bytes", ("holding", "weights")) not in got
    assert got["jaxllm_contexts", ("app", "mail")] == 14
    assert got["jaxllm_context_stored_bytes", ("app", "mail")] == 88 << 20
    assert got["jaxllm_context_chunks", ("app", "mail"), ("bits", "2")] == 301
    assert got["jaxllm_expert_visits_total",] == 120_400
    assert got["jaxllm_expert_hit_rate",] == pytest.approx(109_322 / 120_400)
    assert got["jaxllm_read_bytes_total", ("what", "contexts")] == 310 << 20
    assert got["jaxllm_grammars_total", ("outcome", "ended")] == 2
    # What is missing is no error, nor is no visit.
    none = values(Metrics(lambda: {"experts": {"visits": 0}}))
    assert "jaxllm_expert_hit_rate" not in {key[0] for key in none}


def test_apps_beyond_the_limit_are_one_label():
    figures = {
        "running": [{"app": f"app {at}", "level": 100, "count": 1} for at in range(5)],
        "contexts": {f"app {at}": {"contexts": 2, "chunks": {"8": 3}} for at in range(5)},
    }
    metrics = Metrics(lambda: figures, most_apps=2)
    for at in range(5):
        metrics.accepted(f"app {at}")
    got = values(metrics)
    assert got["jaxllm_calls_accepted_total", ("app", "app 1")] == 1
    assert got["jaxllm_calls_accepted_total", ("app", "other")] == 3
    assert got["jaxllm_running_calls", ("app", "other"), ("level", "100")] == 3
    assert got["jaxllm_contexts", ("app", "other")] == 6
    assert got["jaxllm_context_chunks", ("app", "other"), ("bits", "8")] == 9


def test_kinds_of_errors_are_bounded_and_names_are_escaped():
    metrics = Metrics(dict)
    for at in range(100):
        metrics.failed('a"\n{}', f"Error{at}")
    assert len({key for key in values(metrics) if key[0] == "jaxllm_calls_failed_total"}) == 17
    with pytest.raises(ConfigError, match="at least one value"):
        Names(0)


def test_services_share_nothing_and_threads_may_count_at_once():
    metrics, other = Metrics(dict), Metrics(dict)
    threads = [
        threading.Thread(target=lambda: [metrics.ended("mail", ENDED) for _ in range(500)]) for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert values(metrics)["jaxllm_answer_tokens_total", ("app", "mail")] == 4 * 500 * 21
    assert values(other) == {}


def test_the_guide_names_metrics_that_exist():
    guide = (Path(__file__).parents[3] / "docs/guides/dashboard.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(jaxllm_\w+)`", guide))
    assert len(named) > 20
    known = {key[0] for key in values(used(lambda: FIGURES))}
    assert {name for name in named if not {name, f"{name}_count"} & known} == set()
