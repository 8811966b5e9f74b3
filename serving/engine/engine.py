"""The engine: an open model that answers requests at one of its levels."""

import functools
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.serving.engine.decoding import Decoding
from jaxllm.serving.engine.request import GenerationConfig, Request, Session, Sliding, start_ids
from jaxllm.serving.engine.step import Answer
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.runner import Runner
from jaxllm.text.prompts import prompt_ids, source_prompt
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxllm.serving.ground.prompt_embeddings import PromptEmbeddings
    from jaxllm.serving.guided.compiler import GrammarCompiler
    from jaxllm.serving.images.encoder import ImageEncoder


class Model(Protocol):
    """An open model, with a runner for each of its levels."""

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def tokenizer(self) -> Tokenizer: ...  # noqa: D102

    @property
    def levels(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def images(self) -> "ImageEncoder | None": ...  # noqa: D102

    def runner(self, level: int, /) -> Runner: ...  # noqa: D102

    def warm_up(  # noqa: D102
        self,
        level: int,
        speculation: Any,
        *,
        prompt_tokens: int | None,
        max_tokens: int,
        progress: Progress | None,
    ) -> None: ...

    def facts(self) -> dict[str, Any]: ...  # noqa: D102

    def set_adapter(self, folder: str | Path | None, /) -> None: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


if TYPE_CHECKING:
    import typing_extensions

    # `Engine` alone is one of any model.
    AnyModel = typing_extensions.TypeVar("AnyModel", bound=Model, default=Any)
else:
    AnyModel = TypeVar("AnyModel", bound=Model)
ImagePrompt = tuple[list[int], "PromptEmbeddings | None"]


class Engine(Generic[AnyModel]):
    """Answers prompts and conversations with one level of an open model (`jaxllm.serving.opening` opens one).

    All engines of a model share one lock, which guards each step of an answer, warm-up, changes of weights
    and closing. Threads may share an engine: their answers take turns, since a device is no faster for two,
    and equal those of one thread. A session is used by one thread at a time.

    Attributes:
      model: the open model; all its engines share its weights, runners and tokenizer.
      level: the level that answers where a request names none, in percent.
      speculation: its drafts, a `jaxllm.serving.speculation.speculation.Speculation`; None for none.
    """

    def __init__(
        self,
        model: AnyModel,
        level: int = FULL_LEVEL,
        speculation: Any = None,
        whole: "Engine[AnyModel] | None" = None,
    ) -> None:
        """See the class; `whole` is another engine of the model, whose grammars are shared.

        Raises:
          ConfigError: the model does not serve the level.
        """
        self.model, self.level, self.speculation = model, level, speculation
        self.runner: Any = model.runner(level)
        self._whole = whole

    # -- what it is -------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The model's display name."""
        return self.model.name

    @property
    def cfg(self) -> ModelConfig:
        """Config of the model or the sub-model."""
        return self.runner.cfg

    @property
    def options(self) -> Any:
        """Resolved options."""
        return self.runner.options

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.model.tokenizer

    @property
    def levels(self) -> tuple[int, ...]:
        """Levels that a request may name, in percent, ascending."""
        return self.model.levels

    def at(self, level: int) -> "Engine[AnyModel]":
        """The same model at another level, without drafts: weights, buckets and adapters stay shared.

        Raises:
          ConfigError: the model was not opened for this level.
        """
        return Engine(self.model, level, whole=self._whole or self)

    @functools.cached_property
    def grammars(self) -> "GrammarCompiler":
        """Compiles the grammars of answers, for all engines of the model."""
        if self._whole is not None:
            return self._whole.grammars
        from jaxllm.serving.guided.compiler import GrammarCompiler

        return GrammarCompiler(self.tokenizer, self.cfg.vocab_size)

    def runner_at(self, level: int | None = None) -> Any:
        """The runner of a level; None for this engine's own.

        Raises:
          ConfigError: see `at`.
        """
        return self.runner if level is None or level == self.level else self.model.runner(level)

    def prefill_mode(self, tokens: int, level: int | None = None) -> str:
        """The prefill mode of a prompt of `tokens` tokens at a level: "int8" or "float"."""
        return self.runner_at(level).prefill_chunks(tokens)[0].mode

    def warm_up(
        self,
        *,
        prompt_tokens: int | None = None,
        max_tokens: int = 0,
        progress: Progress | None = None,
        chats: bool = True,
    ) -> None:
        """Compiles and runs once all buckets and the chat template, or only compiles the buckets of one
        request.

        The whole model's engine does this for all levels, an engine at a level only for its own. Buckets
        compiled by an earlier process are loaded from disk (see `EngineOptions.buckets_bytes`).

        Args:
          prompt_tokens: prompt length of the one request; None for all requests. Waits only for the
            buckets of its first token; the others are compiled in the background.
          max_tokens: answer length of the one request; 0 if unknown.
          progress: callback for ("compile", buckets done, buckets in all).
          chats: whether to compile the chat template, which the first chat does otherwise.
        """
        with self.runner.lock:
            self.model.warm_up(
                self.level,
                self.speculation,
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                progress=progress,
            )
        if chats and prompt_tokens is None:
            self.tokenizer.compile_chat_template()

    def set_adapter(self, folder: str | Path | None) -> None:
        """Replaces the low-rank adapter of all levels, without compiling.

        Sessions that continue afterwards are prefilled again: their cache is stale.

        Args:
          folder: adapter folder in PEFT's layout; None for no adapter.

        Raises:
          ConfigError: the model was opened without `adapter_rank`, or with a lower rank or other targets.
          CheckpointError: the folder is missing, corrupt or for another model.
        """
        self.model.set_adapter(folder)

    def close(self) -> None:
        """Closes the model: stops the weight streaming threads and the prefill processors. Later requests
        are refused."""
        with self.runner.lock:
            self.model.close()

    # -- requests ---------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Sequence[int],
        config: GenerationConfig | None = None,
        *,
        level: int | None = None,
        session: Session | None = None,
        sliding: Sliding | None = None,
        tpot_ms: float | None = None,
        rows: "PromptEmbeddings | None" = None,
    ) -> Answer:
        """Answers a prompt: text (special tokens are added) or token ids.

        Args:
          prompt: text or ids to continue.
          config: length, stops and sampling of the answer.
          level: the sub-model that answers, in percent, one of `levels`; None for this engine's.
          session: a conversation whose cache is used and extended.
          sliding: how to continue past the end of the context; None to end the answer there.
          tpot_ms: expected time per further token, if known; otherwise the second token is decoded in a
            dispatch of its own to measure it.
          rows: embeddings in place of some of the prompt's ids, such as those of an image. Requires
            `EngineOptions.prompt_embeddings`; the answer has no drafts.

        Raises:
          ConfigError, ContextOverflow: the prompt is empty, malformed or too long, or the level is not
            served.
        """
        request = self.request(prompt, config, level=level, sliding=sliding, tpot_ms=tpot_ms, rows=rows)
        return self.submit(request, session=session)

    def generate(self, prompt: str | Sequence[int], config: GenerationConfig | None = None) -> Answer:
        """Runs `stream` to the end."""
        return self.stream(prompt, config).result()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        config: GenerationConfig | None = None,
        *,
        session: Session | None = None,
    ) -> Answer:
        """Answers a conversation of {"role", "content"} messages through the model's chat template; an
        encoder-decoder one message (see `jaxllm.text.prompts.source_prompt`). Contents may be lists of texts
        and images (see `jaxllm.serving.images.prompt.split_images`)."""
        tokenizer, rows = self.tokenizer.limited(self.options.context_tokens), None
        if self.cfg.encoder is not None:
            task = "" if config is None else config.task
            prompt = prompt_ids(tokenizer, source_prompt(messages, task=task))
        else:
            from jaxllm.serving.images.prompt import split_images

            plain, files = split_images(messages)
            prompt, rows = self.image_rows(tokenizer.encode_chat(plain, now=datetime.now()), files)
        return self.stream(prompt, config, session=session, rows=rows)

    def image_rows(self, prompt: Sequence[int], files: Sequence[bytes]) -> ImagePrompt:
        """Replaces each `<image>` of a prompt by one image: the ids and rows to pass to `stream`.

        Raises:
          ConfigError, ContextOverflow: the model does not support images, or they are unreadable or too
            long.
        """
        if not files:
            return list(prompt), None
        from jaxllm.serving.images.prompt import require_encoder, with_images
        from jaxllm.text.droppable import PromptTokens

        encoder, window = require_encoder(self.model.images, self.name), self.options.context_tokens
        tiles = encoder.cut_all(files, window)
        with self.runner.lock:
            images = encoder.encode(tiles)
        whole, rows = with_images(self.tokenizer, PromptTokens.of_ids(prompt), images)
        return whole.ids.tolist(), rows

    def request(
        self,
        prompt: str | Sequence[int],
        config: GenerationConfig | None = None,
        *,
        level: int | None = None,
        sliding: Sliding | None = None,
        tpot_ms: float | None = None,
        rows: "PromptEmbeddings | None" = None,
        source: Sequence[int] | None = None,
    ) -> Request:
        """Makes a request of this engine (see `stream`): encodes text, and picks a random seed if none is
        given. With the `source` of an encoder-decoder, the prompt is the decoder's ids so far.

        Raises:
          ConfigError: the prompt is empty, or the level is not served.
        """
        runner = self.runner_at(level)
        runner.require_usable()
        config, begun = config or GenerationConfig(), source is not None
        if rows is not None:
            if isinstance(prompt, str):
                raise ConfigError("rows stand at places of token ids; encode the prompt first")
            prompt = rows.placed(prompt, runner.cfg)
        if isinstance(prompt, str):
            if not prompt:
                raise ConfigError("the prompt is empty; give it at least one character")
            text = self.tokenizer.files.source_text(prompt, config.task)
            prompt = self.tokenizer.limited(runner.options.context_tokens).encode(text)
        if runner.cfg.encoder is not None and source is None:
            prompt, source = start_ids(self.tokenizer, self.name), prompt
        seed = config.sampling.seed
        return Request(
            prompt=tuple(prompt),
            config=config,
            seed=int.from_bytes(os.urandom(8)) if seed is None else seed,
            level=runner.level,
            drafted=self.speculation is not None
            and runner is self.runner
            and config.top_logprobs is None
            and rows is None,
            sliding=sliding,
            tpot_ms=tpot_ms,
            source=None if source is None else tuple(source),
            begun=begun,
            rows=rows,
        )

    def decoding(self, request: Request) -> Decoding:
        """The decoder of one answer's tokens.

        Raises:
          ConfigError: the grammar is invalid, or log-probabilities are not available.
        """
        config, drafts = request.config, self.speculation
        decoding = Decoding(self.runner_at(request.level))
        if drafts is not None and request.drafted:
            decoding = drafts if request.source is None else drafts.of(request.source)
        if not config.guided:
            return decoding
        matcher = None
        if config.grammar is not None:
            stop_ids = config.stop_ids(self.tokenizer.eos_ids)
            # The window ends an answer, too, unless it slides.
            room = self.runner.options.context_tokens - len(request.prompt) + 1
            most = config.max_tokens if request.sliding else min(config.max_tokens, room)
            # Here, because few requests need its import.
            from jaxllm.serving.guided.thought import matcher_of

            # What unlikely tokens are depends on the mask.
            same = config.sampling.filters
            matcher = matcher_of(self.grammars, self.tokenizer, config.grammar, stop_ids, most, same=same)
        # Most processes have neither grammars nor log-probabilities.
        from jaxllm.serving.engine.guided_decoding import GuidedDecoding

        return GuidedDecoding(decoding, matcher, config.top_logprobs)

    def submit(self, request: Request, *, session: Session | None = None) -> Answer:
        """Makes the answer of a request, without running its first step.

        Args:
          request: the request to answer.
          session: a conversation whose cache is used and extended.

        Raises:
          ConfigError, ContextOverflow: see `Request.require_served_by`.
        """
        return Answer(self.decoding(request), self.tokenizer, request, session=session)
