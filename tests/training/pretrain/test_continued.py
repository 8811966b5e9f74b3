"""Training a folder's model on: the masked loss is that of transformers, and the result is a model folder."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoints import huggingface
from jaxllm.errors import ConfigError
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.data.corpus import Corpus
from jaxllm.training.data.encoders import ModelEncoder
from jaxllm.training.data.rows import Splits
from jaxllm.training.data.sources import Source
from jaxllm.training.loop.losses import next_token_losses, outputs_of
from jaxllm.training.lora.run import train_on
from tests.tiny import tiny_tokenizer, write_tiny_folder
from tests.training.jobs import SMOKE
from tests.training.tiny_runs import quiet


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def chats(tmp_path):
    def line(number):
        turns = [("user", f"what follows {number}?"), ("assistant", f"it is {number + 1}")]
        turns += [("user", "and then?"), ("assistant", f"{number + 2}")] if number % 2 else []
        return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]})

    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(line, range(24))))
    return path


def recipe_of(path, **changes):
    sources = (Source(chat=str(path)),)
    return dataclasses.replace(SMOKE, row_tokens=32, sources=sources, held_out_share=0.2, **changes)


def test_masked_loss_is_that_of_transformers(folder, chats, tmp_path):
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    recipe = dataclasses.replace(
        recipe_of(chats), row_tokens=128, batch=4, model=huggingface.read_config(folder)
    )
    corpus = Corpus.open(recipe.sources, None, recipe.held_out_share)
    splits = Splits.of(corpus, ModelEncoder(Tokenizer(tiny_tokenizer())), recipe, tmp_path / "tokens")
    batch = splits.train.batch_at(0)
    params = {name: jnp.asarray(value) for name, value in huggingface.read_params(folder, recipe.model)}
    losses = np.asarray(next_token_losses(outputs_of(params, batch, cfg=recipe.model), batch))
    ours = (losses * batch.weights).sum() / batch.weights.sum()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    nats = count = 0.0
    for row in range(4):
        for start in np.unique(batch.starts[row]):
            own = np.flatnonzero(batch.starts[row] == start)
            if not batch.weights[row, own].any():
                continue
            # transformers shifts labels itself: the document's tokens, answers alone labelled.
            ids = np.append(batch.tokens[row, own], batch.targets[row, own[-1]])
            labels = np.append(-100, np.where(batch.weights[row, own] > 0, batch.targets[row, own], -100))
            given = {"input_ids": torch.tensor(ids[None]), "labels": torch.tensor(labels[None])}
            answers = int((labels >= 0).sum())
            nats, count = nats + model(**given).loss.item() * answers, count + answers
    assert 0 < count == batch.weights.sum() < (batch.tokens > 0).sum() / 2
    np.testing.assert_allclose(ours, nats / count, rtol=1e-4)


@pytest.mark.slow
def test_a_folder_is_trained_on_and_resumes(folder, chats, tmp_path):
    recipe = recipe_of(chats, steps=12, checkpoint_steps=6, peak_learning_rate=1e-2)

    def run(recipe, place="run"):
        return train_on(recipe, folder, quiet(tmp_path / place))

    whole = run(recipe)
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["held_out"]
    assert told["after"] < told["before"] - 0.5
    cfg = huggingface.read_config(whole)
    assert cfg == huggingface.read_config(folder)
    after = dict(huggingface.read_params(whole, cfg))
    before = dict(huggingface.read_params(folder, cfg))
    assert all((after[name] != before[name]).any() for name in before)
    run(dataclasses.replace(recipe, steps=6), "parts")
    parts = dict(huggingface.read_params(run(dataclasses.replace(recipe, steps=6), "parts"), cfg))
    assert set(parts) == set(after)
    with pytest.raises(ConfigError, match="another run"):
        run(dataclasses.replace(recipe, seed=3))


def test_what_is_learnt_must_be_named(folder, tmp_path):
    with pytest.raises(ConfigError, match="--chat"):
        train_on(SMOKE, folder, quiet(tmp_path))
    taught = dataclasses.replace(SMOKE, teacher_share=0.5)
    with pytest.raises(ConfigError, match="no teacher"):
        train_on(taught, folder, quiet(tmp_path))
