"""A recipe of seconds, over sentences of few words."""

import jax
import numpy as np

from jaxllm.training.seq2seq.pairs import PairRows, read_pairs
from jaxllm.training.seq2seq.run import PairSource, Seq2SeqRecipe, init_seq2seq, pair_tokenizer, write_seq2seq

_SHARED = {
    "is_encoder_decoder": True, "vocab_size": 300, "d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 24,
    "num_layers": 2, "num_decoder_layers": 2, "n_positions": 64, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16, "tie_word_embeddings": True,
}  # fmt: skip
T5 = {"model_type": "t5", "feed_forward_proj": "gated-gelu", **_SHARED}
SWITCH = {
    "model_type": "switch_transformers", "dense_act_fn": "relu", "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1, "num_experts": 2, **_SHARED,
}  # fmt: skip


def tiny_recipe(model=T5, **changes):
    fields = {
        "steps": 4, "batch": 4, "row_tokens": 32, "lengths": (16, 32), "peak_learning_rate": 0.02,
        "warmup_steps": 0, "checkpoint_steps": 2, "log_steps": 1, "held_out_share": 0.2, "model": model,
        "sources": (
            PairSource(label="there", pairs=("one.txt", "two.txt"), prefix="number to word:"),
            PairSource(label="back", pairs=("two.txt", "one.txt"), prefix="word to number:"),
        ),
    }  # fmt: skip
    return Seq2SeqRecipe(**{**fields, **changes})


WORDS = ["nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def spoken(number):
    """The digits of a number in words."""
    return " ".join(WORDS[int(digit)] for digit in str(number))


def write_pairs(folder):
    """Writes 60 numbers into one.txt, and their digits in words into two.txt; returns the folder."""
    numbers = [str(n) for n in range(100, 160)]
    words = [spoken(number) for number in numbers]
    for name, lines in (("one", numbers), ("two", words)):
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_random_folder(folder, data, model=T5):
    """Writes a model of random weights, with a tokenizer of the pairs in `data`; returns the folder."""
    recipe = tiny_recipe(model)
    pairs = read_pairs(recipe.sources, data)
    params = jax.jit(lambda key: init_seq2seq(recipe.cfg, key))(jax.random.key(0))
    write_seq2seq(folder, recipe, pair_tokenizer(pairs, recipe), jax.device_get(params))
    return folder


# Sources and targets as tokens.
PAIRS = [([5, 6, 7, 0], [8, 9, 0]), ([5, 10, 0], [11, 12, 13, 14, 0]), ([5, 15, 16, 17, 18, 0], [19, 0])]


def batch():
    rows = PairRows(PAIRS, np.zeros(3, np.int32), (8,), batch_tokens=32, rows_multiple=1, start_id=1, seed=0)
    return next(rows.held_out())
