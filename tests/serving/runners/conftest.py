"""Shares fixtures of other rooms with tests of runners."""

from tests.serving.int8_prefill.conftest import calibrated_bundle

__all__ = ["calibrated_bundle"]
