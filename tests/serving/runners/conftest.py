"""What tests of runners share with those of other rooms."""

from tests.serving.int8_prefill.conftest import calibrated_bundle

__all__ = ["calibrated_bundle"]
