"""A whole run: its folder, its Hugging Face folder, resuming, families and teachers."""

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner

from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.cli.main import cli
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.data.corpus import TokenizedDocuments
from jaxllm.training.data.sources import Source
from jaxllm.training.loop.checkpoints import read_best
from jaxllm.training.loop.trainer import Trainer
from jaxllm.training.pretrain.run import export_best, pretrain, pretrain_job
from tests.training.jobs import SMOKE, assert_same_bits, one_device
from tests.training.tiny_runs import quiet


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
    messages = [{"role": "user", "content": "Once "}, {"role": "assistant", "content": "upon"}]
    assert Tokenizer(files).render_chat(messages) == "Once upon"

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


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not the folder of a training run"):
        export_best(tmp_path)


def test_the_command_that_exports_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxllm.cli.training_options.set_devices", lambda devices: None)
    (tmp_path / "recipe.json").write_text("[]")
    result = CliRunner().invoke(cli, ["export", str(tmp_path), "-o", "hf", "--format", "hf"])
    assert "not the folder of a training run" in str(result.exception)
    assert CliRunner().invoke(cli, ["export", str(tmp_path), "-o", "hf"]).exit_code == 2
