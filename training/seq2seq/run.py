"""Trains an encoder-decoder from pairs, on targets only or with a teacher, to a Hugging Face folder;
translates texts greedily, in batches, and scores them: BLEU, and how often a draft agrees.

A run's folder has `recipe.json`, `tokenizer.json`, `checkpoints/`, `metrics.jsonl`, and at the end `hf/` and
`summary.json`. Calling `train_seq2seq` again on the same folder resumes. Models of one family share a
tokenizer (`tokenizer=`); a smaller one may learn from a larger (`teacher=`). Translation is in float32 for
any weight format; served models are measured by their own benchmarks.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from jax.typing import DTypeLike
from tokenizers import AddedToken, processors

from jaxllm.checkpoints import huggingface, tokenizer_folder
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.experts.routing import Routing
from jaxllm.host_settings import own_jax_settings
from jaxllm.models import decoder, parameters
from jaxllm.models.architectures import architecture
from jaxllm.models.scanned_layers import Remat
from jaxllm.options import option
from jaxllm.quant import dequantize
from jaxllm.tasks.rouge import rouge
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles
from jaxllm.training.data.documents import END_OF_TEXT, PAD
from jaxllm.training.data.encoders import token_id, train_tokenizer
from jaxllm.training.data.sources import Source
from jaxllm.training.loop.checkpoints import Params
from jaxllm.training.loop.fitting import (
    MODEL_FOLDER,
    TOKENIZER_FILE,
    FrozenModel,
    export_best_of,
    fit,
    read_teacher,
    read_tokenizer_file,
)
from jaxllm.training.loop.hardware import step_flops_per_token
from jaxllm.training.loop.losses import router_penalty
from jaxllm.training.loop.run_files import Run, claimed, write_json, write_text
from jaxllm.training.loop.trainer import Job, Trainer
from jaxllm.training.seq2seq.forward import (
    Drop,
    KeysValues,
    decode_next,
    dropout,
    encode_rows,
    no_drop,
    source_keys_values,
    target_hidden,
)
from jaxllm.training.seq2seq.pairs import PairBatch, PairRows, TextPairs, read_pairs, rows_of
from jaxllm.training.settings import TrainSettings

# Their layers are those of `jaxllm.training.seq2seq.forward`.
FAMILIES = ("t5", "mt5", "switch_transformers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairSource(Source):
    """Source of pairs of one task.

    Attributes:
      prefix: task prefix of each source; one token of the tokenizer.
    """

    label: str
    prefix: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        texts = {"label": self.label, "prefix": self.prefix}
        texts |= {f"entry {number} of pairs": path for number, path in enumerate(self.pairs)}
        for key, value in texts.items():
            if not isinstance(value, str) or not value or value != value.strip():
                raise ConfigError(
                    f"the {key} of a source of pairs must be text without spaces around it, got {value!r:.80}"
                )
        if not self.pairs:
            raise ConfigError(f"the source {self.label} of an encoder-decoder has no pairs; give it some")

    @property
    def name(self) -> str:
        """See `label`."""
        return self.label


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2SeqRecipe(TrainSettings):
    """The training of one encoder-decoder; the options' help describes it.

    A step has `batch` times `row_tokens` tokens on each side, in rows of one of the `lengths`. The model is a
    config in Hugging Face's keys, of one of `FAMILIES`.
    """

    folder = "seq2seq"

    model: dict[str, Any]
    sources: tuple[PairSource, ...] = option(
        help="Sources of pairs; the first one's task is the model's default.", entries=1
    )
    lengths: tuple[int, ...] = option(
        help="Lengths of rows in tokens; the last one is `row_tokens`.", low=1, entries=1, ascending=True
    )
    held_out_share: float = option(
        0.01, "Share of the pairs that is not trained on and picks the best checkpoint.", above=0, below=1
    )
    dropout: float = option(0.1, "Share of activations that training drops.", low=0, high=0.9)
    label_smoothing: float = option(
        0.1, "Share of the target distribution that all tokens have equally.", low=0, high=0.9
    )
    teacher_share: float = option(0.0, "Share of the loss from a teacher's distribution.", low=0, high=1)
    balance_weight: float = option(0.01, "Weight of the load-balancing loss of experts.", low=0)
    router_z_weight: float = option(0.001, "Weight of the routers' z-loss.", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, dict) or self.model.get("model_type") not in FAMILIES:
            raise ConfigError(f"the recipe's model needs a model_type of {', '.join(FAMILIES)}")
        self.require_window(self.cfg.window_tokens)
        if self.lengths[-1] != self.row_tokens:
            raise ConfigError(
                f"the last of lengths must be row_tokens, {self.row_tokens}; got {self.lengths}"
            )
        capacity = max(self.cfg.expert_capacity, self.cfg.encoder.expert_capacity if self.cfg.encoder else 0)
        if 0 < capacity < self.row_tokens:
            raise ConfigError(
                f"experts accept at most {capacity} tokens of a row (expert_capacity), but rows have up to "
                f"{self.row_tokens}: training drops no token; raise expert_capacity"
            )

    @functools.cached_property
    def cfg(self) -> ModelConfig:
        """The model."""
        return architecture(self.model["model_type"]).config_from_hf(self.model)


def seq2seq_job(recipe: Seq2SeqRecipe, teacher: FrozenModel | None = None) -> Job:
    """Returns the job that trains a recipe's model."""
    cfg = recipe.cfg

    def init(key: jax.Array) -> Params:
        return init_seq2seq(cfg, key)

    def losses(params: Params, frozen: Any, batch: PairBatch) -> tuple[jax.Array, jax.Array]:
        logits, _ = target_logits(params, batch, cfg=cfg, dtype=jnp.dtype(recipe.computed_in))
        return cross_entropy(logits, batch.targets), jnp.zeros(())

    def sampled(params: Params, frozen: Any, batch: PairBatch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        dtype, drop = jnp.dtype(recipe.computed_in), dropout(key, recipe.dropout)
        logits, routings = target_logits(params, batch, cfg=cfg, dtype=dtype, drop=drop, remat=recipe.remat)
        penalty = jnp.zeros(())
        for routing in routings:
            one = jax.tree.map(lambda each: each[None], routing)
            penalty += router_penalty(
                one, balance_weight=recipe.balance_weight, z_weight=recipe.router_z_weight
            ) / np.float32(len(routings))
        found = cross_entropy(logits, batch.targets, recipe.label_smoothing)
        if teacher is None:
            return found, penalty
        wanted, _ = target_logits(frozen, batch, cfg=teacher.cfg, dtype=dtype)
        share = np.float32(recipe.teacher_share)
        soft = optax.softmax_cross_entropy(logits, jax.nn.softmax(wanted))
        return share * soft + (np.float32(1) - share) * found, penalty

    flops = step_flops_per_token(cfg, recipe.row_tokens)
    if teacher is None:
        return Job(init, losses, sampled_losses=sampled, flops_per_token=flops)
    # A teacher only runs forward.
    flops += step_flops_per_token(teacher.cfg, recipe.row_tokens) / 3
    return Job(init, losses, dict(teacher.params), sampled_losses=sampled, flops_per_token=flops)


def target_logits(
    params: Params,
    batch: PairBatch,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    drop: Drop = no_drop,
    remat: Remat = "none",
) -> tuple[jax.Array, list[Routing]]:
    """Logits `[B, T, V]` float32 of a batch's targets, and the routing of each layer with experts; for the
    arguments see `target_hidden`."""
    computed, hidden, routings = target_hidden(params, batch, cfg=cfg, dtype=dtype, drop=drop, remat=remat)
    return decoder.logits(computed, hidden, cfg=cfg), routings


def cross_entropy(logits: jax.Array, targets: jax.Array | np.ndarray, smoothing: float = 0.0) -> jax.Array:
    """Cross entropy in nats `[B, T]` float32 of targets, with the share `smoothing` spread over all tokens
    (arXiv 1512.00567, section 7)."""
    targets = jnp.asarray(targets)
    found = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    if not smoothing:
        return found
    even = jax.nn.logsumexp(logits, axis=-1) - jnp.mean(logits, axis=-1)
    return np.float32(1 - smoothing) * found + np.float32(smoothing) * even


def init_seq2seq(cfg: ModelConfig, key: jax.Array) -> Params:
    """Returns random parameters to train from, such that the first scores and logits have a variance near
    one although T5 does not scale scores: queries are smaller by H^-0.5, and embeddings that the head is
    tied to are larger, because the head scales them by D^-0.5."""
    params = parameters.init_params(cfg, key)
    for name in params:
        if name.endswith(".q"):
            params[name] *= np.float32(cfg.head_dim**-0.5)
    if cfg.tied_head and cfg.logit_scale != 1.0:
        params["embed.tokens"] *= np.float32(0.25 / 0.02)
    return params


@own_jax_settings()
def train_seq2seq(
    recipe: Seq2SeqRecipe, run: Run, *, tokenizer: Path | None = None, teacher: Path | None = None
) -> Path:
    """Trains a model from scratch, or resumes the run, and exports the best.

    Args:
      recipe: recipe of the run. On resumption only duration and logging may differ from the run's own.
      tokenizer: `tokenizer.json` of another such run; None trains one.
      teacher: Hugging Face folder with the same tokenizer, for a recipe with a `teacher_share`.

    Returns:
      The Hugging Face folder, `hf` in the run's.

    Raises:
      ConfigError: the pairs or the recipe are unusable, or the folder belongs to another run.
    """
    if jax.process_count() > 1:
        raise ConfigError("encoder-decoders are trained by one process; start it without --coordinator")
    mesh = run.mesh(recipe)
    taught = read_teacher(teacher, share=recipe.teacher_share, vocab_size=recipe.cfg.vocab_size)
    pairs = read_pairs(recipe.sources, run.data)
    taken, kept = pairs.split(recipe.held_out_share)
    with claimed(run.folder, recipe, pairs=pairs.digest()) as resuming:
        path = run.folder / TOKENIZER_FILE if resuming else tokenizer
        vocabulary = pair_tokenizer(taken, recipe) if path is None else read_tokenizer_file(path)
        if vocabulary.get_vocab_size() != recipe.cfg.vocab_size:
            raise ConfigError(
                f"the tokenizer has {vocabulary.get_vocab_size()} tokens, but the recipe's model has "
                f"{recipe.cfg.vocab_size}; give another --tokenizer, or set the model's vocab_size"
            )
        for name in (END_OF_TEXT, PAD, *(str(source.prefix) for source in recipe.sources)):
            token_id(vocabulary, name)
        write_text(run.folder / TOKENIZER_FILE, vocabulary.to_str(pretty=True))
    multiple = recipe.accumulate * mesh.shape["data"] * mesh.shape["fsdp"]
    rows, held_out = (encoded_rows(each, vocabulary, recipe, multiple) for each in (taken, kept))
    trainer = Trainer(seq2seq_job(recipe, taught), recipe, mesh)
    epoch, count = rows.batches_per_epoch, parameters.parameter_count(recipe.cfg)
    run.say(
        f"{count:,} parameters on {mesh.size} devices; {len(rows.pairs):,} "
        f"pairs to train on, {len(held_out.pairs):,} held out; {recipe.steps:,} steps of about "
        f"{recipe.batch * recipe.row_tokens:,} tokens on each side, {100 * rows.padding_share:.0f} % of them "
        f"padding; {recipe.steps / epoch:.1f} epochs of {epoch:,} steps"
    )
    names = [source.name for source in recipe.sources]
    best = fit(trainer, rows.batch_at, held_out.held_out, run, names)
    write_seq2seq(run.folder / MODEL_FOLDER, recipe, vocabulary, trainer.whole(best.params))
    _, by_source = trainer.evaluate(best.params, held_out.held_out())
    losses = {"all": best.loss, **{names[source]: loss for source, loss in by_source.items()}}
    summary: dict[str, Any] = {
        "parameters": count,
        "best_step": best.step,
        "epochs": round(best.step / epoch, 2),
        "pairs": {"training": len(rows.pairs), "held_out": len(held_out.pairs)},
        "held_out_nats_per_token": losses,
    }
    run.finish(summary)
    return run.folder / MODEL_FOLDER


def pair_tokenizer(pairs: TextPairs, recipe: Seq2SeqRecipe) -> tokenizers.Tokenizer:
    """Trains the tokenizer of both sides.

    The prefix of each task is a token, so that a source grows by one token; and every text ends in
    `<|endoftext|>`, as T5's do.

    Raises:
      ConfigError: the texts are too few for the vocabulary.
    """
    prefixes = sorted({str(source.prefix) for source in recipe.sources})
    texts = (text for pair in pairs.texts for text in pair)
    tokenizer = train_tokenizer(texts, recipe.cfg.vocab_size - len(prefixes))
    # The text after a prefix is encoded like the beginning of a text.
    tokenizer.add_tokens([AddedToken(each, rstrip=True, normalized=False) for each in prefixes])
    end = token_id(tokenizer, END_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, end)]
    )
    return tokenizer


def encoded_rows(
    pairs: TextPairs, tokenizer: tokenizers.Tokenizer, recipe: Seq2SeqRecipe, rows_multiple: int
) -> PairRows:
    """Encodes pairs, each source after its prefix, and puts them into rows.

    Args:
      tokenizer: tokenizer of `pair_tokenizer`.
      rows_multiple: divisor of the number of rows of every batch.
    """
    leads = [f"{source.prefix} " for source in recipe.sources]

    def encode(texts: list[str]) -> list[list[int]]:
        return [each.ids for each in tokenizer.encode_batch_fast(texts)]

    start_id = token_id(tokenizer, PAD)
    return rows_of(pairs, leads, encode, recipe, recipe.lengths, rows_multiple, start_id)


def export_best_seq2seq(run_dir: Path, out: Path | None = None) -> Path:
    """Writes the checkpoint with the lowest held-out loss so far as a folder, by default
    `run_dir/hf`; also while the run continues in another process.

    Raises:
      CheckpointError: `run_dir` contains no run, or no checkpoint yet.
    """
    return export_best_of(run_dir, Seq2SeqRecipe, seq2seq_job, write_seq2seq, out)


def write_seq2seq(folder: Path, recipe: Seq2SeqRecipe, tokenizer: tokenizers.Tokenizer, params: Any) -> None:
    """Writes a Hugging Face folder: config with the prefix of each task, weights, tokenizer, and a generation
    config with start and end tokens and the first task's prefix."""
    end, start = (token_id(tokenizer, name) for name in (END_OF_TEXT, PAD))
    ids = {"eos_token_id": end, "pad_token_id": start, "decoder_start_token_id": start}
    tasks = {each.name: {"prefix": f"{each.prefix} "} for each in recipe.sources}
    extra = {**ids, "task_specific_params": tasks}
    huggingface.write_folder(folder, recipe.cfg, params, extra_config=extra)
    tokenizer_folder.write_tokenizer(
        folder,
        TokenizerFiles(
            tokenizer_json=tokenizer.to_str(pretty=True),
            special={"eos_token": END_OF_TEXT, "pad_token": PAD},
            eos_ids=(end,),
        ),
    )
    # No key of transformers' config, but its pipelines read the prefix of a task from it.
    write_json(Path(folder) / "generation_config.json", {**ids, "prefix": f"{recipe.sources[0].prefix} "})


# Lengths of rows: few, because each is compiled.
LENGTHS = (32, 64, 128, 256, 512)
_BATCH_TOKENS = 4096
# Number of tokens so far, last token of each row, whether it has ended, keys and values, and the answers.
_State = tuple[jax.Array, jax.Array, jax.Array, list[KeysValues], jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Translator:
    """A trained model.

    Attributes:
      params: float32.
    """

    cfg: ModelConfig
    params: Mapping[str, jax.Array]
    tokenizer: Tokenizer

    @classmethod
    def read(cls, model: Path) -> "Translator":
        """Reads a Hugging Face folder, or a bundle at the width of its weights.

        Raises:
          CheckpointError: there is no such model.
          ConfigError: its family cannot be trained here.
        """
        frozen = FrozenModel.read(model)
        cfg, files, float32 = frozen.cfg, frozen.tokenizer.files, jnp.dtype(jnp.float32)
        params = {name: dequantize(each, float32) for name, each in frozen.params.items()}
        if cfg.model_type not in FAMILIES:
            raise ConfigError(f"{model} is of {cfg.model_type}; here {', '.join(FAMILIES)} are judged")
        if not files.start_ids:
            raise ConfigError(f"{model} does not say which token its decoder begins with")
        return cls(cfg, params, frozen.tokenizer)

    @property
    def start_id(self) -> int:
        """Token that the decoder begins with."""
        return self.tokenizer.files.start_ids[0]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, with its end."""
        return [list(self.tokenizer.encode(text)) for text in texts]

    def translate(
        self,
        sources: Sequence[Sequence[int]],
        most_tokens: int = 100,
        *,
        params: Mapping[str, jax.Array] | None = None,
    ) -> list[list[int]]:
        """Returns the greedy answer to each source, with its end if that comes within `most_tokens`.

        Args:
          sources: token ids.
          most_tokens: maximum number of tokens of an answer.
          params: parameters in place of the model's own, of the same shapes; nothing is compiled for them.
        """
        answers: list[list[int]] = [[] for _ in sources]
        ends, own = set(self.tokenizer.eos_ids), self.params if params is None else params
        for places, read, read_tokens in _source_rows(sources, self.start_id):
            tokens = np.asarray(self._compiled(most_tokens, own, read, read_tokens))
            for place, row in zip(places, tokens.tolist(), strict=False):
                stop = next((at for at, token in enumerate(row) if token in ends), most_tokens - 1)
                answers[place] = row[: stop + 1]
        return answers

    def agreement(self, sources: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> float:
        """Returns the share of another model's answer tokens that this model predicts after the preceding
        ones."""
        rows = PairRows(
            list(zip(sources, answers, strict=True)), np.zeros(len(sources), np.int32), LENGTHS,
            batch_tokens=_BATCH_TOKENS, rows_multiple=1, start_id=self.start_id, seed=0,
        )  # fmt: skip
        logits = jax.jit(lambda params, batch: target_logits(params, batch, cfg=self.cfg)[0].argmax(-1))
        same, count = 0.0, 0.0
        for batch in rows.held_out():
            said = np.asarray(logits(self.params, batch))
            same += float(((said == batch.targets) * batch.weights).sum())
            count += float(batch.weights.sum())
        return same / count

    @functools.cached_property
    def _compiled(self) -> Callable[..., jax.Array]:
        """`_greedy`, compiled once for each shape."""
        return jax.jit(self._greedy, static_argnums=0)

    def _greedy(
        self, most_tokens: int, params: Mapping[str, jax.Array], read: jax.Array, read_tokens: jax.Array
    ) -> jax.Array:
        """`[B, most_tokens]` int32; undefined after a row's end."""
        cfg, rows = self.cfg, read.shape[0]
        encoded, _ = encode_rows(params, read, read_tokens, cfg=cfg)
        sources = source_keys_values(params, encoded, cfg=cfg)
        empty = jnp.zeros((rows, cfg.kv_heads, most_tokens, cfg.head_dim), jnp.float32)
        ends = np.asarray(self.tokenizer.eos_ids, np.int32)

        def going_on(state: _State) -> jax.Array:
            position, _, ended, _, _ = state
            return (position < most_tokens) & ~jnp.all(ended)

        def more(state: _State) -> _State:
            position, last, ended, past, said = state
            hidden, past = decode_next(params, last, position, past, sources, read_tokens, cfg=cfg)
            token = decoder.logits(params, hidden, cfg=cfg).argmax(-1).astype(jnp.int32)
            said = jax.lax.dynamic_update_slice_in_dim(said, token[:, None], position, axis=1)
            ended = ended | (token[:, None] == ends).any(-1)
            return position + 1, token, ended, past, said

        start = jnp.full(rows, self.start_id, jnp.int32)
        begun = (
            jnp.zeros((), jnp.int32), start, jnp.zeros(rows, bool), [(empty, empty)] * cfg.layers,
            jnp.zeros((rows, most_tokens), jnp.int32),
        )  # fmt: skip
        return jax.lax.while_loop(going_on, more, begun)[-1]


def bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """Returns BLEU of a corpus, from 0 to 100, by `sacrebleu` with its defaults: one reference per text,
    cased, 13a tokens (arXiv 1804.08771).

    Raises:
      ConfigError: `sacrebleu` is not installed, or the numbers of references and texts differ.
    """
    try:
        import sacrebleu
    except ImportError as error:
        raise ConfigError("BLEU needs sacrebleu: pip install 'jaxllm[eval]'") from error
    if len(texts) != len(references) or not texts:
        raise ConfigError(f"BLEU takes a reference for each text, got {len(references)} for {len(texts)}")
    return float(sacrebleu.corpus_bleu(list(texts), [list(references)]).score)


def likeness(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Compares texts to their references, of several to the best: the share of exact matches (`exact`), and
    Rouge as in `jaxllm.tasks.rouge`, all from 0 to 1.

    Raises:
      ConfigError: `rouge-score` is not installed, or the numbers of references and texts differ.
    """
    if len(texts) != len(references) or not texts:
        raise ConfigError(f"each text needs references, got {len(references)} for {len(texts)}")
    each = [
        {"exact": float(text in right), **rouge(right, text)}
        for text, right in zip(texts, references, strict=True)
    ]
    return {name: round(sum(one[name] for one in each) / len(each), 4) for name in each[0]}


def _source_rows(
    sources: Sequence[Sequence[int]], padding_id: int
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Yields batches of sources of one length: indices, tokens `[B, S]` and numbers of valid tokens `[B]`."""
    lengths = np.array([len(each) for each in sources])
    if lengths.max() > LENGTHS[-1]:
        raise ConfigError(f"a source has {lengths.max()} tokens; at most {LENGTHS[-1]} are read here")
    of = np.searchsorted(LENGTHS, lengths)
    for number, length in enumerate(LENGTHS):
        own, count = np.flatnonzero(of == number), _BATCH_TOKENS // length
        for first in range(0, len(own), count):
            places = own[first : first + count].tolist()
            read, read_tokens = np.full((count, length), padding_id, np.int32), np.ones(count, np.int32)
            for row, place in enumerate(places):
                read[row, : lengths[place]], read_tokens[row] = sources[place], lengths[place]
            yield places, read, read_tokens
