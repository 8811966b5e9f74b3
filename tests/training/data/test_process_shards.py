"""Two processes divide files, encoding and rows, and train what one does; runs go on in any number."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.training.data import corpus
from jaxllm.training.data.corpus import Corpus, exchanged
from jaxllm.training.data.encoders import PieceEncoder
from jaxllm.training.data.rows import PackedBatches, evaluation_batches
from jaxllm.training.data.sources import Source
from jaxllm.training.loop.fitting import TOKENIZER_FILE, read_tokenizer_file
from jaxllm.training.loop.parallel import MeshShape
from jaxllm.training.pretrain.run import pretrain
from tests.training.data.test_packing import RAGGED
from tests.training.jobs import SMOKE
from tests.training.processes import join, started_group, told_by
from tests.training.tiny_runs import quiet

SOURCES = (Source(text="texts", repeats=1.5), Source(chat="chats.jsonl", answer_weight=2.0, skip_bad=True))
RECIPE = dataclasses.replace(
    SMOKE, model=dataclasses.replace(SMOKE.model, vocab_size=288), sources=SOURCES, held_out_share=0.1,
    batch=8, accumulate=2, steps=4, checkpoint_steps=2, log_steps=1,
)  # fmt: skip
HALF = dataclasses.replace(RECIPE, steps=2)


def write_data(folder):
    (folder / "texts").mkdir(parents=True)
    for file in range(3):
        texts = (f"Story {file} of {n}: a cat sat on {n * 7} mats." for n in range(40))
        (folder / "texts" / f"{file}.txt").write_text("\n\n".join(texts))
    rows = [json.dumps({"prompt": f"How many is {n}?", "completion": f"{n} is {n}."}) for n in range(40)]
    (folder / "chats.jsonl").write_text("\n".join([*rows, "no JSON"]))
    (folder / "bad.jsonl").write_text("no JSON")
    return folder


def run(recipe, data, folder, mesh):
    return pretrain(recipe, dataclasses.replace(quiet(folder, data), mesh_shape=MeshShape.parse(mesh)))


def one_file(data, folder):
    """Encodes a single file, by blocks."""
    opened = Corpus.open((Source(text="texts/0.txt"),), data, 0.1)
    encoder = PieceEncoder(read_tokenizer_file(folder / "half" / TOKENIZER_FILE))
    opened.tokenized(encoder, "train", folder / "one")


def main(data, folder, port, process):
    """One process of two, with two devices: begins a run, and goes on with another."""
    join(port, process, 2)
    data, folder = Path(data), Path(folder)
    read, real = [], corpus._documents_of

    def noted(source, file, on_bad):
        read.append(Path(str(file)).name)
        return real(source, file, on_bad)

    corpus._documents_of = noted
    Corpus.open(SOURCES, data, 0.1)
    opened = sorted(read)
    run(HALF, data, folder / "half", "data=2,tensor=2")
    run(RECIPE, data, folder / "begun", "data=1,fsdp=4")
    corpus._ENCODE_DOCUMENTS = 4
    one_file(data, folder)
    try:
        Corpus.open((*SOURCES, Source(chat="bad.jsonl")), data, 0.1)
    except ConfigError as error:
        print(json.dumps({"read": opened, "error": str(error)}))


def files_of(folder):
    return {path.parent.name: path.read_bytes() for path in sorted(folder.glob("*/tokens.bin"))}


def losses_of(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [[row["step"], row["loss"], row.get("held_out_loss") or 0.0] for row in rows]


@pytest.mark.slow
def test_two_processes_train_what_one_does_and_go_on_with_its_run(tmp_path):
    data = write_data(tmp_path / "data")
    group, alone = tmp_path / "group", tmp_path / "alone"
    run(HALF, data, group / "begun", "data=1")
    shutil.copytree(group / "begun", alone / "half")
    group_of_two = started_group("tests.training.data.test_process_shards", data, group)
    run(RECIPE, data, alone / "whole", "data=1")
    told = [told_by(process) for process in group_of_two]
    # Each file is read by one of them.
    assert [each["read"] for each in told] == [["0.txt", "2.txt"], ["1.txt", "chats.jsonl"]]
    assert all("process 0: " in each["error"] and "bad.jsonl" in each["error"] for each in told)
    whole = losses_of(alone / "whole")
    np.testing.assert_allclose(losses_of(group / "half"), whole[:2], rtol=1e-4)
    np.testing.assert_allclose(losses_of(group / "begun"), whole, rtol=1e-4)
    run(RECIPE, data, group / "half", "data=1")
    np.testing.assert_allclose(losses_of(group / "half"), whole, rtol=1e-4)
    assert len(files_of(group / "half" / "tokens")) == 2
    assert files_of(group / "half" / "tokens") == files_of(alone / "half" / "tokens")
    one_file(data, alone)
    assert files_of(group / "one") == files_of(alone / "one")
    assert not list(group.glob("**/*.shard-*"))


@pytest.mark.parametrize("own", [(0, 2), (1,)])
def test_rows_of_other_processes_are_not_read(own):
    whole, part = (PackedBatches(RAGGED, (), 16, 3, 1, rows) for rows in (None, own))
    others = [row for row in range(3) if row not in own]
    pairs = [(part.batch_at(step), whole.batch_at(step)) for step in range(5)]
    held_out = (evaluation_batches(RAGGED, 16, 3, own=rows) for rows in (own, None))
    for found, wanted in [*pairs, *zip(*held_out, strict=True)]:
        for one, other in zip(dataclasses.astuple(found), dataclasses.astuple(wanted), strict=True):
            np.testing.assert_array_equal(one[list(own)], other[list(own)])
            assert not one[others].any()
    np.testing.assert_array_equal(part.batch_at(4, whole=True).tokens, whole.batch_at(4).tokens)


def test_a_failure_alone_keeps_its_kind():
    assert exchanged(lambda: b"told") == [b"told"]

    def fails():
        raise FileNotFoundError("gone")

    with pytest.raises(FileNotFoundError):
        exchanged(fails)
