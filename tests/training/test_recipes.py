"""Recipes: packaged ones, values out of their domain, names and paths."""

import json

import pytest

from jaxllm.errors import ConfigError
from jaxllm.training.decoders import LoraRecipe, PretrainRecipe
from jaxllm.training.elastic.job import ElasticRecipe
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRecipe
from jaxllm.training.seq2seq.run import Seq2SeqRecipe
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
        (SMOKE, {"accumulate": 3}, "must be a multiple of accumulate"),
        (SMOKE, {"row_tokens": 64}, "at most the model's window"),
        (SMOKE, {"peak_learning_rate": "fast"}, "peak_learning_rate"),
        (SMOKE, {"sources": [{"path": "x"}]}, "malformed sources"),
        (
            SMOKE,
            {"sources": [{"text": "a", "stories": "b"}]},
            "stories, task, chat, functions and pairs",
        ),
        (MOOD, {"lora": {"ranks": 3}}, "malformed lora"),
        (MOOD, {"lora": {"targets": ["attn.z"]}}, "no targets attn.z"),
        (SMALL, {"tasks": ["lambada"]}, "lambada has no options"),
        (SMALL, {"decide": {"steps": 3}}, "lacks batch"),
        (SMALL, {"decide": SMALL.to_json()["decide"] | {"row_tokens": 128}}, "both heads read the same rows"),
        (SMALL, {"encoder": {"layers": 3}}, "malformed encoder"),
        (SMALL, {"prompt_ratios": [1.0, 0.5]}, "prompt_ratios must be ascending"),
        (ADAPTERS, {"levels": [50]}, "end with 100"),
        (ADAPTERS, {"importance": "alphabet"}, "importance must be"),
        (ADAPTERS, {"recovery": "lora", "whole_kl_nats": 0.1}, "bounds a joint recovery"),
        (PAIRS, {"model": {"model_type": "bart"}}, "needs a model_type of t5"),
        (PAIRS, {"lengths": (16, 24)}, "must be row_tokens"),
        (PAIRS, {"model": {**SWITCH, "expert_capacity": 8}}, "expert_capacity"),
        (PAIRS, {"sources": [SIDES | {"pairs": ["a"]}]}, "or one of JSON lines with two fields"),
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
    with pytest.raises(ConfigError, match="the recipes are functions, large, mood"):
        LoraRecipe.load("none")
    path = tmp_path / "mine.toml"
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
    path = tmp_path / "mine.toml"
    for content, message in (
        ("# and so on\n" * 200_000, "larger than"),
        ('base = "/dev/zero"\n', "not a regular file"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=f"cannot read the recipe .*{message}"):
            PretrainRecipe.load(str(path))
