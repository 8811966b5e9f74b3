"""Tests what --draft names."""

import pytest

from jaxllm.cli.model_choice import ModelChoice, speculation
from jaxllm.errors import ConfigError
from jaxllm.serving.ground.speculation_options import SpeculationOptions


def test_drafts_by_name():
    assert speculation("none") is None
    assert speculation("ngram") == SpeculationOptions(drafter="ngram")
    assert speculation("nested") == SpeculationOptions(drafter="nested")
    assert speculation("nested:50") == SpeculationOptions(drafter="nested", level=50)
    assert speculation("level:30%") == SpeculationOptions(drafter="level", level=30)
    assert speculation("draft") == SpeculationOptions(model="draft")
    # Without a name a model drafts by itself; commands that answer nothing have no drafts.
    assert speculation(None) == speculation("") == SpeculationOptions.by_itself()
    assert speculation(ModelChoice().draft) is None
    with pytest.raises(ConfigError, match="takes a percentage"):
        speculation("nested:half")
