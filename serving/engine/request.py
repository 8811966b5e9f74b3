"""Requests: a prompt's tokens with length, stops and sampling, and the session that a request continues."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.errors import ConfigError, ContextOverflow
from jaxllm.models.features import require_decoder_alone
from jaxllm.options import check_options, option
from jaxllm.sampling_state import Sampling
from jaxllm.serving.engine.decoding import MAX_TOP_LOGPROBS
from jaxllm.serving.ground.text_stream import MAX_STOP_IDS
from jaxllm.serving.runners.runner import PrefillChunk, Runner
from jaxllm.text.tokenizer import MAX_TOKEN_ID, Tokenizer

if TYPE_CHECKING:
    from jaxllm.kernels.native import ChunkTable
    from jaxllm.kv.cache import KVCache
    from jaxllm.serving.ground.prompt_embeddings import PromptEmbeddings
    from jaxllm.serving.guided.grammar import Grammar

DEFAULT_MAX_TOKENS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sliding:
    """Options of continuing an answer past the window.

    Attributes:
      sink_tokens: number of first tokens that stay; less than half of the window.
    """

    sink_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Length, stops and sampling of one answer.

    Attributes:
      max_tokens: maximum number of tokens.
      min_tokens: number of tokens before which no stop token may come; stop strings may.
      stop: strings that end the answer; not part of its text.
      stop_token_ids: tokens that end the answer, in addition to the model's end tokens.
      markers: special tokens whose text is part of the answer's (see `AnswerFormat.special`).
      ignore_eos: whether to continue past the model's end tokens.
      task: task of an encoder-decoder, one of `TokenizerFiles.tasks`, whose prefix is put before a source
        text; empty for the model's default, or none.
      grammar: grammar that the text must match; None for any text. The answer has drafts unless its
        sampling `filters`.
      top_logprobs: number of most likely tokens to return log-probabilities of, besides each sampled
        token; None for none. The answer then has no drafts, and one token per dispatch.
    """

    max_tokens: int = option(DEFAULT_MAX_TOKENS, low=1)
    min_tokens: int = option(0, low=0)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = option((), low=0, high=MAX_TOKEN_ID)
    markers: tuple[str, ...] = ()
    ignore_eos: bool = False
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    task: str = ""
    grammar: "Grammar | None" = None
    top_logprobs: int | None = option(None, low=0, high=MAX_TOP_LOGPROBS)

    def __post_init__(self) -> None:
        check_options(self)
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if self.grammar is not None:
            # Here, because few requests need its import.
            from jaxllm.serving.guided.grammar import Grammar

            if not isinstance(self.grammar, Grammar):
                raise ConfigError(f"grammar must be a Grammar, got {type(self.grammar).__name__}")

    @property
    def guided(self) -> bool:
        """Whether the answer is decoded by `guided_decoding.GuidedDecoding`."""
        return self.grammar is not None or self.top_logprobs is not None

    def stop_ids(self, eos_ids: Sequence[int]) -> np.ndarray:
        """The stop tokens as input of buckets, padded with -1."""
        ids = sorted({*self.stop_token_ids, *(() if self.ignore_eos else eos_ids)})
        if len(ids) > MAX_STOP_IDS:
            raise ConfigError(f"{len(ids)} stop tokens; at most {MAX_STOP_IDS} are supported")
        return np.array(ids + [-1] * (MAX_STOP_IDS - len(ids)), np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fed:
    """The first chunk of a prompt, computed while the session was restored.

    Attributes:
      first: position of its first token.
      rest: the prompt's other chunks.
      logits: logits after it, if `rest` is empty.
    """

    first: int
    chunk: PrefillChunk
    rest: Sequence[PrefillChunk]
    logits: Any


@dataclasses.dataclass
class Session:
    """A conversation's cache, in memory between answers.

    A running bucket owns the cache (it is donated), so the session is empty meanwhile, and stays empty if
    the bucket fails.

    Attributes:
      tokens: tokens whose keys and values are in `cache`.
      cache: None for an empty session.
      weights_version: `Runner.weights_version` of the weights that computed the cache.
      chunks: addresses of the chunks that the cache attends to in place; open as long as a session has it.
      fed: the first chunk of the next request, if the cache has it already.
      state_tokens: number of tokens that the cache's states have consumed; None without states.
      source: source of an encoder-decoder's cache; None for other models.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    cache: "KVCache | None" = None
    weights_version: tuple[int, int] | None = None
    chunks: "ChunkTable | None" = None
    fed: Fed | None = None
    state_tokens: int | None = None
    source: tuple[int, ...] | None = None

    def reusable(self, prompt: Sequence[int], tokens: Sequence[int] | None = None) -> int:
        """Length of the prefix of a prompt that the cache has of `tokens` (default: the session's own).
        Recurrent states cannot be rolled back: with states, it is the tokens that they have consumed, or
          0."""
        common = common_prefix(self.tokens if tokens is None else tokens, prompt)
        return common if self.state_tokens in (None, common) else 0

    @property
    def size_bytes(self) -> int:
        """Memory of the cache, including the space for further tokens."""
        cache: Any = self.cache
        if cache is None or hasattr(cache, "nbytes"):
            return 0 if cache is None else cache.nbytes
        # A JAX cache; devices that only run exported programs have no JAX.
        import jax

        return sum(leaf.nbytes for leaf in jax.tree.leaves(cache))

    @property
    def resident_bytes(self) -> int | None:
        """Its pages that have been written, where the system reports them: native caches use memory as they
        fill. None while a running bucket owns the cache."""
        cache: Any = self.cache
        if cache is None:
            return None
        if hasattr(cache, "nbytes"):
            return cache.nbytes
        import jax

        from jaxllm.serving.host.process_memory import resident_of

        try:
            leaves = [each for each in jax.tree.leaves(cache) if isinstance(each, jax.Array)]
            return sum(resident_of(each.unsafe_buffer_pointer(), each.nbytes) for each in leaves)
        except (RuntimeError, ConfigError):  # A bucket has just taken it; or no /proc, or another device.
            return None

    def take(self) -> "tuple[list[int], KVCache | None]":
        """Empties the session and returns its tokens and cache."""
        taken = self.tokens, self.cache
        self.tokens, self.cache = [], None
        return taken


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A request to an engine.

    Attributes:
      prompt: token ids; for an encoder-decoder, the ids that its decoder begins with.
      source: token ids for the encoder; None for models without one.
      begun: whether an encoder-decoder's prompt has tokens after its start tokens.
      rows: embeddings in place of some of the prompt's ids; None for none.
      config: length, stops and sampling.
      level: the sub-model that answers, in percent.
      drafted: whether the answer may be drafted.
      sliding: how to continue past the end of the context; None to end the answer there.
      tpot_ms: expected time per further token, if known; otherwise the second token is decoded in a
        dispatch of its own to measure it.
    """

    prompt: tuple[int, ...]
    config: GenerationConfig
    seed: int
    level: int
    drafted: bool = False
    sliding: Sliding | None = None
    tpot_ms: float | None = None
    source: tuple[int, ...] | None = None
    begun: bool = False
    rows: "PromptEmbeddings | None" = None

    @property
    def asked_tokens(self) -> int:
        """Number of input tokens: of the source, of the prompt, or of both if an encoder-decoder's answer
        has begun."""
        if self.source is None:
            return len(self.prompt)
        return len(self.source) + (len(self.prompt) if self.begun else 0)

    def require_served_by(self, runner: Runner) -> None:
        """Checks that a runner can answer it.

        Raises:
          ConfigError: the prompt is empty, a token is outside the vocabulary, or `sliding` keeps too many
            tokens.
          ContextOverflow: the prompt is longer than the context.
        """
        window, vocab = runner.options.context_tokens, runner.cfg.vocab_size
        self._require_source(runner)
        if not self.prompt:
            raise ConfigError("the prompt is empty; give it at least one token of text")
        if len(self.prompt) > window:
            raise ContextOverflow(
                f"the prompt has {len(self.prompt)} tokens, the context holds {window} (the model's window "
                f"is {runner.cfg.window_tokens}); shorten it"
                + (" or ask for a longer --context" if window < runner.cfg.window_tokens else "")
            )
        ids = self.prompt
        if self.rows is not None:
            if not getattr(runner.options, "prompt_embeddings", False):
                raise ConfigError(
                    "rows in place of tokens need buckets of their own: open the engine with "
                    "EngineOptions(prompt_embeddings=True)"
                )
            if self.sliding is not None:
                raise ConfigError(
                    "an answer to rows in place of tokens cannot outgrow the context: its tokens are fed "
                    "again where they come to stand, and rows are never made of tokens; ask without `sliding`"
                )
            ids = [0, *np.delete(self.prompt, self.rows.at).tolist()]
        worst = max(ids) if min(ids) >= 0 else min(ids)
        if not 0 <= worst < vocab:
            raise ConfigError(f"token {worst} is outside the model's vocabulary of {vocab}")
        # Besides the sinks, one token must be fed again, and one is decoded from.
        most = kept_tokens(window) - 2
        if self.sliding is not None and not 0 <= self.sliding.sink_tokens <= most:
            raise ConfigError(
                f"{self.sliding.sink_tokens} tokens cannot stay where a context of {window} slides: at most "
                f"{max(0, most)} may; ask for fewer, or for a longer --context"
            )

    def _require_source(self, runner: Runner) -> None:
        encoder = runner.cfg.encoder
        if encoder is None:
            if self.source is not None:
                raise ConfigError(
                    f"{runner.cfg.model_type} has no encoder to read a source; give it a prompt"
                )
            return
        if not self.source:
            raise ConfigError(f"{runner.cfg.model_type} reads a source; give it at least one token of text")
        if self.sliding is not None:
            require_decoder_alone(runner.cfg, "answers that outgrow the context")
        longest = min(encoder.window_tokens, runner.options.context_tokens)
        if len(self.source) > longest:
            raise ContextOverflow(
                f"the source has {len(self.source)} tokens, and the encoder reads at most {longest} (its "
                f"window is {encoder.window_tokens}); shorten it"
                + (" or ask for a longer --context" if longest < encoder.window_tokens else "")
            )
        if not all(0 <= each < runner.cfg.vocab_size for each in self.source):
            raise ConfigError(
                f"the source has tokens outside the model's vocabulary of {runner.cfg.vocab_size}"
            )


def start_ids(tokenizer: Tokenizer, name: str) -> tuple[int, ...]:
    """The start tokens of the decoder of the encoder-decoder `name`.

    Raises:
      ConfigError: the model's folder named none.
    """
    found = tokenizer.files.start_ids
    if not found:
        raise ConfigError(
            f"{name} does not say which token its decoder begins with: set decoder_start_token_id in the "
            "folder's generation_config.json (for mBART a language's token, as forced_bos_token_id, too), "
            "and prepare the folder again"
        )
    return found


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    most = min(len(a), len(b))
    # Usually one is a prefix of the other, which needs no Python loop.
    if list(a[:most]) == list(b[:most]):
        return most
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def slid(tokens: Sequence[int], *, sink_tokens: int, most: int) -> list[int]:
    """The first `sink_tokens` tokens and the newest ones, `most` together."""
    newest = max(0, most - sink_tokens)
    return [*tokens[:sink_tokens], *tokens[len(tokens) - newest :]]


def kept_tokens(window: int) -> int:
    """Number of tokens that stay when a sequence outgrows the window."""
    return window // 2
