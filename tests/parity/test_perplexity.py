"""Perplexity of a real model on real text: equal to transformers', and what each weight width costs."""

import math

import pytest

from jaxllm import Engine
from jaxllm.serving.evaluation.texts import perplexity
from tests import tiny_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("shipped_compilations")

SEPARATOR = "<|endoftext|>"
BATCH = 16


@pytest.fixture(scope="module")
def documents(data_dir):
    text = (data_dir / "text" / "tinystories_valid.txt").read_text(encoding="utf-8")
    return [document for document in text.split(SEPARATOR) if document.strip()]


def theirs(folder, encoded, window):
    """Perplexity over the same windows, in batches padded on the right (where no token looks)."""
    with tiny_hf.quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    windows = [ids[at : at + window + 1] for ids in encoded for at in range(0, len(ids) - 1, window)]
    windows.sort(key=len)
    loss = 0.0
    with torch.no_grad():
        for at in range(0, len(windows), BATCH):
            rows = [torch.tensor(ids) for ids in windows[at : at + BATCH]]
            batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
            scores = model(batch[:, :-1].clamp(min=0)).logits.double()
            targets = batch[:, 1:]
            loss += float(torch.nn.functional.cross_entropy(scores.mT, targets, reduction="sum"))
    return math.exp(loss / sum(len(ids) - 1 for ids in windows))


def engine_at(folder, weights):
    return Engine.open(folder, weights=weights, warm_up=False)


@pytest.mark.slow
def test_whole_validation_text_to_four_digits(stories_folder, documents):
    engine = engine_at(stories_folder, "f32")
    ours = perplexity(engine, documents)
    encoded = [engine.tokenizer.encode(text) for text in documents]
    expected = theirs(stories_folder, encoded, ours.window_tokens)
    assert f"{ours.perplexity:.4f}" == f"{expected:.4f}"


@pytest.fixture(scope="module")
def full(stories_folder, documents):
    """The perplexity of some documents by the weights as they are."""
    return perplexity(engine_at(stories_folder, "f32"), documents[:40]).perplexity


# Bounds on the relative increase, from the formats' error: a sixteenth of a bit for 8-bit weights is
# nothing, 16 levels on a model of 260 K parameters are felt.
@pytest.mark.parametrize(
    ("weights", "bound"),
    [("bf16", 0.002), ("int8", 0.01), ("int4", 0.25), ("int4-min", 0.25), ("int4-all", 0.3)],
)
def test_narrow_weights_cost_little(stories_folder, documents, full, weights, bound):
    narrow = perplexity(engine_at(stories_folder, weights), documents[:40]).perplexity
    assert abs(narrow / full - 1) < bound
