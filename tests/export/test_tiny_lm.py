"""The tiny LM as programs: a device plans with it as the live service does, token for token."""

import dataclasses

import numpy as np
import pytest

from jaxllm.config import WHOLE
from jaxllm.elastic.slo import Slo
from jaxllm.errors import ConfigError
from jaxllm.export.device.service import ProgramService
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import read_subject
from jaxllm.serving.elastic import tiny_lm as live_tiny_lm
from jaxllm.serving.elastic.planner import Planner
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.elastic.profiling import measure_coarsely
from jaxllm.serving.elastic.tiny_lm import TinyPlanner
from jaxllm.tasks.example import TaskExample
from jaxllm.text.droppable import prompt_tokens
from jaxllm.text.tokenizer import Tokenizer
from tests.export.models import CHUNKS, CONTEXT, exported, write_planned
from tests.tiny import tiny_tokenizer

WORDS = [
    "the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away", "from", "a",
    "small", "cat",
]  # fmt: skip
# So slow that the time to plan does not count.
PROFILE = DeviceProfile(
    levels=(40, WHOLE), tokens=(1, 1000), chunk_tokens=(1,),
    ttft_ms=((400.0, 400_000.0), (1000.0, 1_000_000.0)), tpot_ms=((1600.0,) * 2, (4000.0,) * 2),
)  # fmt: skip
SLOS = [Slo(ttft=ttft, tpot=tpot) for ttft in (0.2, 0.35, 0.5, 0.7, 0.9) for tpot in (0.3, 0.6, 0.9)]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    return write_planned(tmp_path_factory.mktemp("planned") / "tiny.jaxllm")


@pytest.fixture(scope="module", params=["stablehlo", "tflite", "tflite int8"])
def service(request, planned, tmp_path_factory):
    """Of the programs, planned by a profile of theirs."""
    subject = read_subject(planned[0], levels=(40,))
    plan = ExportPlan(context_tokens=CONTEXT, chunk_tokens=CHUNKS, cache_tokens=(), levels=(40,))
    engine = exported(request.param, subject, tmp_path_factory.mktemp("programs") / "tiny-lm", plan)
    return ProgramService(engine, measure_coarsely(engine))


@pytest.fixture(scope="module")
def live(planned):
    with pytest.MonkeyPatch.context() as patch:
        # Its larger matrices are at 8 bits.
        patch.setattr(live_tiny_lm, "_LARGE", 1 << 16)
        return TinyPlanner(planned[1], (40, WHOLE))


def prompts():
    tokenizer = Tokenizer(tiny_tokenizer())
    for count in (3, 9, 16):
        user = " ".join(WORDS[:count])
        yield prompt_tokens(tokenizer, TaskExample(user=user, answer="", system="say it"))


def test_levels_and_kept_tokens_are_those_of_the_live_service(service, live):
    """Both plan by one profile."""
    ours = service.planner._proposer
    kinds = set()
    mine, theirs = (Planner(PROFILE, (40, WHOLE), each) for each in (ours, live))
    for prompt in prompts():
        np.testing.assert_allclose(ours.scores(prompt), live.scores(prompt), atol=1e-3)
        for slo in SLOS:
            asked = {"answer_tokens": 8}
            found, wanted = (each.plan(prompt, slo, **asked) for each in (mine, theirs))
            assert (found.level, found.prompt_ratio) == (wanted.level, wanted.prompt_ratio)
            assert found.kept.tolist() == wanted.kept.tolist()
            kinds.add((found.source, found.prompt_ratio < 1))
    assert ("proposed", True) in kinds


def test_a_call_is_planned_with_it(service):
    answer = service.call(" ".join(WORDS[:5]), slo=Slo(ttft=0.5, tpot=0.9), max_tokens=4).result()
    assert answer.plan.source in ("proposed", "fallback", "nearest")
    assert service.engine.model.tiny_lm.tokenizer is not None


def test_a_manifest_with_a_tiny_lm_and_no_programs_of_it_is_refused(service):
    manifest = service.engine.model.executor.manifest
    bare = tuple(each for each in manifest.signatures if each.kind != "tiny_lm")
    with pytest.raises(ConfigError, match="a tiny LM, or programs of one, but not both"):
        dataclasses.replace(manifest, signatures=bare)
    shorter = tuple(each for each in manifest.signatures if (each.kind, each.tokens) != ("tiny_lm", 64))
    with pytest.raises(ConfigError, match="reads its rows of 64 tokens"):
        dataclasses.replace(manifest, signatures=shorter)
    assert isinstance(manifest, Manifest)
