"""Drafts over StableHLO programs: the same answers, whoever drafts."""

import dataclasses
import shutil

import pytest

from jaxllm.errors import ConfigError
from jaxllm.export.folder_format.manifest import TOKENIZER, Manifest, StoredFile, write_tokenizer
from jaxllm.export.programs.model import open_program
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.speculation.speculation import Speculation
from jaxllm.speculation.token_tree import Growing, accepted_path
from tests.export.drafting import ALWAYS, DRAWN, Branching, require_same_answers, with_drafts
from tests.export.models import CONFIG, PROMPTS

pytest.importorskip("flatbuffers")


@pytest.fixture(scope="module")
def plain(stablehlo):
    engine = open_program(stablehlo)
    engine.warm_up()
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("level", [100, 0])
def test_answers_are_those_without_drafts(plain, level):
    own = {"drafter": "level", "level": level} if level else {"drafter": "ngram"}
    counts = require_same_answers(with_drafts(plain, **own), plain)
    if level == 100:
        # Lines that it is hardly sure of are short, and what is drawn is seldom the likeliest.
        assert counts.acceptance_length > 2


@pytest.mark.parametrize("config", [CONFIG, DRAWN])
def test_an_accepted_branch_moves_behind_the_sequence(plain, config):
    wanted = plain.generate(PROMPTS[1], config)
    trees = TreeShape(nodes=(8,), room=8)
    options = SpeculationOptions(drafter="ngram", **ALWAYS, trees=trees)
    drafter = Branching(wanted.sequence, 8)
    engine = plain.at(100)
    engine.speculation = Speculation(engine.runner, drafter, options)
    assert engine.generate(PROMPTS[1], config).tokens == wanted.tokens
    assert drafter.times.steps > 2
    assert engine.speculation.counts.acceptance_length > 2


def test_one_request_takes_programs_of_one_cache(stablehlo):
    engine = open_program(stablehlo, speculation=SpeculationOptions(**ALWAYS, drafter="ngram"))
    engine.warm_up(prompt_tokens=5, max_tokens=12)
    ready = [each.name for each in engine.runner.signatures if engine.model.executor.is_ready(each)]
    assert ready == ["cache_32_prefill_16", "cache_32_decode", "cache_32_verify_8"]
    engine.generate(PROMPTS[1], CONFIG)
    assert ready == [each.name for each in engine.runner.signatures if engine.model.executor.is_ready(each)]


def test_a_path_follows_what_is_chosen():
    tree = Branching([1, 2, 3, 4], 8).grow([1], 2, Growing(0.0, 8), None)[0]
    assert tree.tokens[:5].tolist() == [2, 4, 3, 5, 4]
    assert accepted_path(tree, [3, 0, 4, 0, 0, 0, 0, 0]).tolist() == [0, 2, 4]
    assert accepted_path(tree, [4, 5, 4, 0, 0, 0, 0, 0]).tolist() == [0, 1]
    assert accepted_path(tree, [9, 5, 4, 0, 0, 0, 0, 0]).tolist() == [0]


def test_what_does_not_fit(stablehlo, plain, tmp_path):
    def opened(folder, **options):
        open_program(folder, speculation=SpeculationOptions(**options))

    with pytest.raises(ConfigError, match=r"level 70 was not exported"):
        with_drafts(plain, drafter="level", level=70)
    with pytest.raises(ConfigError, match=r"no such folder; make one with `jaxllm export`"):
        with_drafts(plain, model=tmp_path / "none")
    with pytest.raises(ConfigError, match="no drafter 'oracle'"):
        with_drafts(plain, drafter="oracle")
    folder = shutil.copytree(stablehlo, tmp_path / "copy")
    manifest = Manifest.read(folder)
    kept = tuple(each for each in manifest.signatures if each.kind != "verify")
    dataclasses.replace(manifest, signatures=kept).write(folder)
    with pytest.raises(ConfigError, match=r"verify no drafts; export the model with --verify-tokens"):
        opened(folder, drafter="ngram")
    files = manifest.read_tokenizer(folder)
    swapped = files.tokenizer_json.replace('"!"', '"\\u0000\\u0000"', 1)
    write_tokenizer(folder / TOKENIZER, dataclasses.replace(files, tokenizer_json=swapped))
    stored = {**manifest.files, TOKENIZER: StoredFile.of(folder / TOKENIZER)}
    dataclasses.replace(manifest, files=stored).write(folder)
    with pytest.raises(ConfigError, match="another tokenizer"):
        with_drafts(plain, model=folder)
