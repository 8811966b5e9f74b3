"""The table of families and rooms in the documents is what rooms say."""

import itertools

import pytest

from jaxllm.errors import ConfigError
from jaxllm.models.architectures import ARCHITECTURES
from jaxllm.models.features import FEATURES, feature_refusal, require_feature
from tests.docs.families import TABLE, default_config, families_table


def test_the_table_is_up_to_date():
    assert TABLE.read() == families_table(), "run python -m tests.docs.families"


def test_rooms_refuse_by_name():
    for cfg, room in itertools.product(map(default_config, ARCHITECTURES), FEATURES):
        reason = feature_refusal(cfg, room)
        if reason is None:
            require_feature(cfg, room)
            continue
        assert "\n" not in reason
        with pytest.raises(ConfigError) as caught:
            require_feature(cfg, room)
        assert str(caught.value) == reason
