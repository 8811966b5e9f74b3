"""Recipes: packaged ones, values out of their domain, names and paths."""

import json
import os

import pytest

from jaxllm.errors import ConfigError
from jaxllm.training.data.sources import Source
from jaxllm.training.pretrain.job import PretrainRecipe

SMOKE = PretrainRecipe.load("smoke")


@pytest.mark.parametrize("name", PretrainRecipe.names())
def test_packaged_recipes_load_and_read_back(name):
    recipe = PretrainRecipe.load(name)
    assert PretrainRecipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    assert hash(recipe) == hash(PretrainRecipe.load(name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lerning_rate": 1.0}, "unknown recipe key lerning_rate"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"batch": 2.5}, "batch"),
        ({"accumulate": 3}, "must be a multiple of accumulate"),
        ({"optimizer": "sgd"}, "one of adamw, muon"),
        ({"muon_learning_rate_factor": 0}, "muon_learning_rate_factor"),
        ({"precision": "float16"}, "one of float32, bfloat16"),
        ({"remat": 1}, "remat must be one of none, dots, full"),
        ({"row_tokens": 64}, "at most the model's window"),
        ({"held_out_share": 1}, "held_out_share must be a number above 0 and below 1"),
        ({"peak_learning_rate": "fast"}, "peak_learning_rate"),
        ({"clip_norm": float("nan")}, "clip_norm"),
        ({"teacher_share": 2}, "teacher_share"),
        ({"chat_template": 3}, "chat_template must be text"),
        ({"model": 3}, "model must be a TOML table"),
        ({"sources": [{"path": "x"}]}, "malformed sources"),
        ({"sources": [{"task": "weather"}]}, "no task 'weather'"),
        ({"sources": [{"text": "a", "stories": "b"}]}, "one of text, stories, task, chat and pairs"),
    ],
)
def test_a_malformed_recipe_names_the_key(change, message):
    with pytest.raises(ConfigError, match=message):
        PretrainRecipe.from_json({**SMOKE.to_json(), **change})


def test_sources_have_names():
    assert Source(text="a/b.txt").name == "b"
    assert Source(stories="a/b.txt").name == "b-told"
    assert Source(task="news").name == "news"


def test_recipes_are_found_by_name_or_path(tmp_path):
    with pytest.raises(ConfigError, match=r"the recipes are .*smoke, stories"):
        PretrainRecipe.load("story")
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
