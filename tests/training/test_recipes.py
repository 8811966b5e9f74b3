"""Recipes: packaged ones, values out of their domain, names and paths."""

import json
import os

import pytest

from jaxllm.errors import ConfigError
from jaxllm.training.elastic.job import ElasticRecipe
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRecipe
from jaxllm.training.lora.run import LoraRecipe
from jaxllm.training.pretrain.run import PretrainRecipe
from jaxllm.training.seq2seq.job import Seq2SeqRecipe
from tests.training.seq2seq.tiny import SWITCH, tiny_recipe

PACKAGED = [
    (kind, name)
    for kind in (PretrainRecipe, LoraRecipe, ElasticRecipe, TinyLmRecipe, Seq2SeqRecipe)
    for name in kind.names()
]


@pytest.mark.parametrize(("kind", "name"), PACKAGED)
def test_packaged_recipes_load_and_read_back(kind, name):
    recipe = kind.load(name)
    assert kind.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    if kind is PretrainRecipe:
        assert hash(recipe) == hash(kind.load(name))


def test_packaged_recipes_of_levels():
    names = "adapters", "equal-time", "family", "large", "quick", "translate"
    assert ElasticRecipe.names() == list(names)
    recipe, together, family, large, quick, translate = map(ElasticRecipe.load, names)
    assert (large.precision, large.remat, large.whole_kl_nats > 0) == ("bfloat16", "full", True)
    assert [len(source.pairs) for source in translate.sources] == [2, 2]
    assert quick.levels == TinyLmRecipe.load("quick").levels

    def differing(one, other):
        return {name for name, value in one.to_json().items() if value != other.to_json()[name]}

    # What is compared differs in how levels recover, and in the steps that take as long.
    assert differing(recipe, together) == {"recovery", "steps", "peak_learning_rate"}
    assert (recipe.optimizer, recipe.lora.rank, recipe.levels[0]) == ("adamw", 8, 20)
    assert differing(together, family) == {"optimizer", "steps"}


SMOKE, MOOD, SMALL, ADAPTERS = (
    PretrainRecipe.load("smoke"), LoraRecipe.load("mood"), TinyLmRecipe.load("small"),
    ElasticRecipe.load("adapters"),
)  # fmt: skip
PAIRS, SIDES = tiny_recipe(), {"label": "a", "prefix": "a:"}


@pytest.mark.parametrize(
    ("recipe", "change", "message"),
    [
        (SMOKE, {"lerning_rate": 1.0}, "unknown recipe key lerning_rate"),
        (SMOKE, {"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        (SMOKE, {"batch": 2.5}, "batch"),
        (SMOKE, {"accumulate": 3}, "must be a multiple of accumulate"),
        (SMOKE, {"optimizer": "sgd"}, "one of adamw, muon"),
        (SMOKE, {"muon_learning_rate_factor": 0}, "muon_learning_rate_factor"),
        (SMOKE, {"precision": "float16"}, "one of float32, bfloat16"),
        (SMOKE, {"remat": 1}, "remat must be one of none, dots, full"),
        (SMOKE, {"row_tokens": 64}, "at most the model's window"),
        (SMOKE, {"held_out_share": 1}, "held_out_share must be a number above 0 and below 1"),
        (SMOKE, {"peak_learning_rate": "fast"}, "peak_learning_rate"),
        (SMOKE, {"clip_norm": float("nan")}, "clip_norm"),
        (SMOKE, {"teacher_share": 2}, "teacher_share"),
        (SMOKE, {"chat_template": 3}, "chat_template must be text"),
        (SMOKE, {"model": 3}, "model must be a TOML table"),
        (SMOKE, {"sources": [{"path": "x"}]}, "malformed sources"),
        (SMOKE, {"sources": [{"task": "weather"}]}, "no task 'weather'"),
        (SMOKE, {"sources": [{"text": "a", "repeats": -1}]}, "repeats"),
        (SMOKE, {"sources": [{}]}, "one of text, stories"),
        (SMOKE, {"sources": [{"text": "a", "stories": "b"}]}, "one of text, stories, task, chat and pairs"),
        (MOOD, {"lora": {"ranks": 3}}, "malformed lora"),
        (MOOD, {"lora": {"targets": ["attn.z"]}}, "no targets attn.z"),
        (MOOD, {"sources": []}, "sources must have 1 or more entries"),
        (MOOD, {"speed": 3}, "unknown recipe key speed"),
        (SMALL, {"tasks": ["lambada"]}, "lambada has no options"),
        (SMALL, {"tasks": ["none"]}, "no task 'none'"),
        (SMALL, {"compressions": []}, "compressions must have 1 or more entries"),
        (SMALL, {"score": 3}, "score must be a TOML table"),
        (SMALL, {"decide": {"steps": 3}}, "lacks batch"),
        (SMALL, {"decide": SMALL.to_json()["decide"] | {"row_tokens": 128}}, "both heads read the same rows"),
        (SMALL, {"encoder": {"layers": 3}}, "malformed encoder"),
        (SMALL, {"levels": 3}, "levels must be a list, got 3"),
        (SMALL, {"prompt_ratios": [1.0, 0.5]}, "prompt_ratios must be ascending"),
        (ADAPTERS, {"levels": [50]}, "end with 100"),
        (ADAPTERS, {"anchor_share": 2}, "anchor_share"),
        (ADAPTERS, {"recovery": "magic"}, "recovery must be"),
        (ADAPTERS, {"order": "alphabet"}, "order must be"),
        (ADAPTERS, {"importance": "alphabet"}, "importance must be"),
        (ADAPTERS, {"recovery": "lora", "whole_kl_nats": 0.1}, "bounds a joint recovery"),
        (ADAPTERS, {"calibration_tokens": 0}, "calibration_tokens"),
        (PAIRS, {"model": {"model_type": "bart"}}, "needs a model_type of t5"),
        (PAIRS, {"lengths": (32, 16)}, "ascending"),
        (PAIRS, {"lengths": (16, 24)}, "must be row_tokens"),
        (PAIRS, {"model": {**SWITCH, "expert_capacity": 8}}, "expert_capacity"),
        (PAIRS, {"dropout": 1.0}, "dropout"),
        (PAIRS, {"sources": ()}, "sources must have 1 or more entries"),
        (PAIRS, {"sources": [SIDES | {"pairs": ["a"]}]}, "or one of JSON lines with two fields"),
        (PAIRS, {"sources": [SIDES | {"pairs": ["a", "b"], "fields": ["b", "c"]}]}, "two text files, or one"),
        (PAIRS, {"sources": [SIDES | {"text": "a"}]}, "has no pairs"),
        (
            PAIRS,
            {"sources": [SIDES | {"pairs": ["a", "b"], "prefix": "a: "}]},
            "the prefix of a source of pairs",
        ),
    ],
)
def test_a_malformed_recipe_names_the_key(recipe, change, message):
    with pytest.raises(ConfigError, match=message):
        type(recipe).from_json({**recipe.to_json(), **change})


def test_recipes_are_found_by_name_or_path(tmp_path):
    with pytest.raises(ConfigError, match=r"the recipes are .*smoke, stories"):
        PretrainRecipe.load("story")
    with pytest.raises(ConfigError, match="the recipes are large, mood"):
        LoraRecipe.load("none")
    path = tmp_path / "mine.toml"
    path.write_text("steps = 3\nsteps = 4\n")
    with pytest.raises(ConfigError, match=r"mine\.toml"):
        PretrainRecipe.load(str(path))
    path.write_text("steps = 3\n")
    with pytest.raises(ConfigError, match="lacks batch, model, peak_learning_rate"):
        PretrainRecipe.load(str(path))


def test_a_recipe_may_stand_on_another_file(tmp_path):
    base, path = tmp_path / "base.toml", tmp_path / "mine.toml"
    base.write_text('batch = 2\nsteps = 9\n[[sources]]\ntask = "news"\n')
    model = (
        "[model]\nmodel_type = 'llama'\nvocab_size = 300\nhidden_size = 8\nlayers = 1\nheads = 1\n"
        "kv_heads = 1\nhead_dim = 8\nffn_size = 8\nwindow_tokens = 16\n"
    )
    path.write_text(f'base = "base.toml"\nsteps = 3\nrow_tokens = 8\npeak_learning_rate = 0.1\n{model}')
    recipe = PretrainRecipe.load(str(path))
    assert (recipe.batch, recipe.steps, [each.name for each in recipe.sources]) == (2, 3, ["news"])
    base.write_text('base = "mine.toml"\n')
    with pytest.raises(ConfigError, match="stands on another itself"):
        PretrainRecipe.load(str(path))
    base.unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        PretrainRecipe.load(str(path))


def test_a_recipe_that_never_ends_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "long.toml").write_text("# and so on\n" * 200_000)
    for name in ("pipe.toml", "long.toml"):
        with pytest.raises(ConfigError, match=f"cannot read the recipe .*{name}"):
            PretrainRecipe.load(str(tmp_path / name))
    (tmp_path / "mine.toml").write_text('base = "/dev/zero"\n')
    with pytest.raises(ConfigError, match="not a regular file"):
        PretrainRecipe.load(str(tmp_path / "mine.toml"))
