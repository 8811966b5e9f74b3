"""A whole run: its folder, its Hugging Face folder, resuming, families and teachers."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.checkpoints import huggingface
from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.checkpoints.peft import read_adapter
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.lora import LoraConfig
from jaxllm.prepare import prepare
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.data.corpus import Corpus, TokenizedDocuments
from jaxllm.training.data.encoders import ModelEncoder
from jaxllm.training.data.rows import Splits
from jaxllm.training.data.sources import Source
from jaxllm.training.decoders import LoraRecipe, export_best, pretrain, pretrain_job, train_lora, train_on
from jaxllm.training.loop.checkpoints import read_best
from jaxllm.training.loop.losses import next_token_losses, outputs_of
from jaxllm.training.loop.trainer import Trainer
from tests.tiny import TINY, tiny_tokenizer, write_tiny_folder
from tests.training.seq2seq.tiny import SWITCH, T5, tiny_recipe, write_random_folder
from tests.training.tiny_runs import SMOKE, assert_same_bits, one_device, quiet


@pytest.mark.slow
def test_pretrain_ends_with_a_hugging_face_folder(tmp_path, monkeypatch):
    read, opened = TokenizedDocuments.read, []
    monkeypatch.setattr(
        TokenizedDocuments, "read", lambda folder: (opened.append(folder.name.split("-")[0]), read(folder))[1]
    )
    run, valid = tmp_path / "run", tmp_path / "valid.txt"
    valid.write_text("Assignments bind names to values.\n\nThe if statement chooses.\n")
    folder = pretrain(SMOKE, quiet(run), valid=[valid])
    assert folder == run / "hf"
    assert opened == ["train", "held_out", "valid"]
    trainer = Trainer(pretrain_job(SMOKE), SMOKE, one_device())
    best, step, _ = read_best(run / "checkpoints", trainer.abstract())
    params = best.params

    cfg = read_config(folder)
    assert cfg == SMOKE.model
    written = dict(read_params(folder, cfg))
    assert_same_bits(written, {name: params[name] for name in written})
    files = read_tokenizer(folder)
    assert (files.eos_ids, files.bos_id) == ((0, 5), None)

    summary = json.loads((run / "summary.json").read_text())
    assert summary["tokens_seen"] == step * SMOKE.batch * SMOKE.row_tokens
    valid_summary = summary["valid"]
    assert valid_summary["documents"] == 2
    assert valid_summary["nats_per_byte"] == pytest.approx(
        valid_summary["nats_per_token"] * (valid_summary["tokens"] - 2) / valid_summary["bytes"]
    )
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in metrics] == [1, 2, 3, 4, 5, 6]

    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    assert export_best(run) == folder
    assert (folder / "model.safetensors").read_bytes() == weights

    # The folder goes on with its own run, and refuses another.
    longer = dataclasses.replace(SMOKE, steps=7)
    pretrain(longer, quiet(run))
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 7
    with pytest.raises(ConfigError, match="differs in seed, the documents"):
        pretrain(dataclasses.replace(longer, seed=1), quiet(run), texts=[valid])


@pytest.mark.slow
def test_a_family_shares_a_tokenizer_and_a_student_learns_from_its_teacher(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"cat number {i} sat on mat {i * 7 % 10}" for i in range(300)))
    recipe = dataclasses.replace(
        SMOKE, model=dataclasses.replace(SMOKE.model, vocab_size=290), sources=(Source(text=str(text)),)
    )
    recipe = dataclasses.replace(recipe, steps=4, checkpoint_steps=4, log_steps=4, teacher_share=0.0)
    teacher = pretrain(recipe, quiet(tmp_path / "teacher", tmp_path))
    student_recipe = dataclasses.replace(recipe, teacher_share=1.0, peak_learning_rate=1e-2, steps=60)
    tokenizer = tmp_path / "teacher" / "tokenizer.json"
    with pytest.raises(ConfigError, match="--teacher"):
        pretrain(student_recipe, quiet(tmp_path / "student", tmp_path), tokenizer=tokenizer)
    run = quiet(tmp_path / "student", tmp_path)
    student = pretrain(student_recipe, run, tokenizer=tokenizer, teacher=teacher)
    assert (student / "tokenizer.json").read_bytes() == (teacher / "tokenizer.json").read_bytes()
    metrics = (tmp_path / "student" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in metrics]
    # It approaches a teacher that knows little, hence not the text but the teacher's own entropy.
    assert np.log(290) > losses[0] > losses[-1] > 4.5
    other = dataclasses.replace(student_recipe, model=dataclasses.replace(recipe.model, vocab_size=291))
    with pytest.raises(ConfigError, match="one tokenizer"):
        pretrain(other, quiet(tmp_path / "other", tmp_path), teacher=teacher)


def test_a_run_that_cannot_start_does_not_claim_its_folder(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("a\n\nb\n\nc\n")
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match="enough distinct pieces"):
        pretrain(SMOKE, quiet(run), texts=[text])
    text.write_text("one document")
    with pytest.raises(ConfigError, match="two distinct documents"):
        pretrain(SMOKE, quiet(run), texts=[text])
    with pytest.raises(CheckpointError, match="not the folder"):
        export_best(run)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the run's folder"):
        pretrain(SMOKE, quiet(tmp_path / "file"))


# Training a folder's model on: the masked loss is that of transformers, and the result is a model folder.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def chats(tmp_path):
    def line(number):
        texts = f"what follows {number}?", f"it is {number + 1}", "and then?", f"{number + 2}"
        turns = zip(("user", "assistant") * 2, texts[: 2 + number % 2 * 2], strict=False)
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
    for other, message in (
        (dataclasses.replace(recipe, seed=3), "another run"),
        (SMOKE, "--chat"),
        (dataclasses.replace(SMOKE, teacher_share=0.5), "no teacher"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(other)


# Adapters: they learn, the model does not change, and the folder at the end is used.
ADAPTER = LoraRecipe(
    steps=40, batch=2, row_tokens=128, peak_learning_rate=2e-2, warmup_steps=2, checkpoint_steps=20,
    log_steps=20, lora=LoraConfig(rank=4, alpha=8), sources=(Source(task="sentiment", prompt_weight=0.0),),
    held_out_share=0.1,
)  # fmt: skip


def tuned(recipe, model, data, folder, **options):
    return train_lora(recipe, model, quiet(folder, data), **options)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_an_adapter_learns_over_every_width(model, data, tmp_path, weights):
    folder = tuned(ADAPTER, model, data, tmp_path / "run", weights=weights)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    losses = summary["held_out"]
    assert losses["with"] < 0.8 * losses["without"]
    lora, adapter = read_adapter(folder, TINY)
    own = {each for each in LoraConfig.targets if not each.startswith("cross.")}
    assert (lora.rank, lora.alpha, set(lora.targets)) == (4, 8, own)
    assert all(np.abs(value).max() > 0 for value in adapter.values())
    assert summary["parameters"] == sum(value.size for value in adapter.values())
    # The run is over: nothing is trained again, and the same is written.
    before = (folder / "adapter_model.safetensors").read_bytes()
    tuned(ADAPTER, model, data, tmp_path / "run", weights=weights)
    assert (folder / "adapter_model.safetensors").read_bytes() == before
    other = dataclasses.replace(ADAPTER, lora=LoraConfig(rank=2))
    with pytest.raises(ConfigError, match="another run"):
        tuned(other, model, data, tmp_path / "run")


PAIRS = LoraRecipe(
    steps=8, batch=4, row_tokens=32, peak_learning_rate=2e-2, warmup_steps=0, checkpoint_steps=4, log_steps=4,
    lora=LoraConfig(rank=2, alpha=4), held_out_share=0.2,
    sources=(
        Source(pairs=("one.txt", "two.txt")),
        Source(pairs=("two.txt", "one.txt"), prefix="word to number:"),
    ),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "weights"), [(SWITCH, "int8"), pytest.param(T5, "f32", marks=pytest.mark.campaign)]
)
def test_an_adapter_learns_on_both_sides(pairs_data, tmp_path, family, weights):
    bundle = tmp_path / "model.jaxllm"
    prepare(write_random_folder(tmp_path / "hf", pairs_data, family), bundle, weights=weights)
    folder = train_lora(PAIRS, bundle, quiet(tmp_path / "run", pairs_data))
    losses = json.loads((tmp_path / "run" / "summary.json").read_text())["held_out"]
    assert losses["with"] < losses["without"] - 0.1
    # PEFT makes another class of model of it.
    assert json.loads((folder / "adapter_config.json").read_text())["task_type"] == "SEQ_2_SEQ_LM"
    _, adapter = read_adapter(folder, tiny_recipe(family).cfg)
    assert {name.split(".")[0] for name in adapter} == {"encoder", "layers"}
    options = EngineOptions(chunk_tokens=(16,), decode_block=4, context_tokens=48, adapter_rank=2)
    engine = Engine.open(bundle, options=options)
    before = engine.generate("number to word: 123").tokens
    engine.set_adapter(folder)
    assert engine.generate("number to word: 123").tokens != before
    engine.close()
