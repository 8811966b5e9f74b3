"""Times of subgraphs in a file: read back, kept together, and measured anew where they are malformed."""

import dataclasses
import json

import pytest

from jaxllm.serving.int8_prefill.stage_bucket import IntegerStageBucket
from jaxllm.serving.int8_prefill.subgraph_times import SubgraphTime, SubgraphTimes

ONE = IntegerStageBucket(
    stage="project", shadowed=False, tokens=16, cache_tokens=0, layer=0, float_rows=0, device="cpu:0"
)
OTHER = dataclasses.replace(ONE, stage="finish", device="cpu:1", own_cores=True)
TIME = SubgraphTime(alone=(1.0, 2.0), shared=(3.0, 4.0))


def test_what_is_kept_comes_back(tmp_path):
    """Two processes that measured different stages both keep theirs."""
    path = tmp_path / "profiles" / "times.json"
    here, there = SubgraphTimes(path, IntegerStageBucket), SubgraphTimes(path, IntegerStageBucket)
    here.put({ONE: TIME}, 0.5)
    here.keep()
    there.put({OTHER: TIME}, 0.25)
    there.keep()
    found = SubgraphTimes(path, IntegerStageBucket)
    assert (found[ONE], found[OTHER]) == (TIME, TIME)
    assert found.handover_ms == 0.25


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[",
        b"[]",
        b"null",
        b'{"version": 1}',
        b'{"version": 1, "handover_ms": 0, "times": 3}',
        b'{"version": 1, "handover_ms": NaN, "times": []}',
        b'{"version": 1, "handover_ms": 0, "times": [{"alone": [1, 2], "shared": [1, 2]}]}',
        b"\xff",
    ],
)
def test_what_is_malformed_is_as_nothing(tmp_path, content, caplog):
    path = tmp_path / "times.json"
    path.write_bytes(content)
    found = SubgraphTimes(path, IntegerStageBucket)
    assert ONE not in found
    assert "measured again" in caplog.text
    found.put({ONE: TIME}, 0.5)
    found.keep()
    assert SubgraphTimes(path, IntegerStageBucket)[ONE] == TIME


def test_another_version_is_as_nothing(tmp_path):
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"version": 0}))
    assert ONE not in SubgraphTimes(path, IntegerStageBucket)


def test_a_negative_time_is_none(tmp_path):
    path = tmp_path / "times.json"
    kept = SubgraphTimes(path, IntegerStageBucket)
    kept.put({ONE: TIME}, 0.5)
    kept.keep()
    path.write_text(path.read_text().replace("3.0", "-3.0"))
    assert ONE not in SubgraphTimes(path, IntegerStageBucket)
