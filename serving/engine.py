"""The engine: an open model that answers requests, at one of its levels."""

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from jaxllm.config import WHOLE, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.formats import WeightFormat
from jaxllm.text.droppable import PromptTokens
from jaxllm.text.prompts import prompt_ids, source_prompt
from jaxllm.text.tokenizer import Tokenizer
from serving.answer import Answer
from serving.decoding import Decoding, PlainDecoding
from serving.guided.compiler import GrammarCompiler
from serving.guided.decoding import GuidedDecoding
from serving.host.progress import Progress
from serving.images.messages import taken_apart
from serving.images.prompt import require_encoder, with_images
from serving.open_model import Model
from serving.prompt_rows import PromptRows
from serving.request import GenerationConfig, Request, Session, start_ids
from serving.sliding import Sliding
from serving.speculation.options import SpeculationOptions

if TYPE_CHECKING:
    from serving.loading import LoadedModel
    from serving.options import EngineOptions
    from serving.programs.model import ProgramModel
    from serving.speculation.speculation import Speculation


AnyModel = TypeVar("AnyModel", bound=Model)
ImagePrompt = tuple[list[int], PromptRows | None]


class Engine(Generic[AnyModel]):
    """Answers prompts and conversations with one level of an open model.

    All engines of a model share one lock, for each step of an answer, for warm-up, for a change of weights
    and for closing. Threads may share an engine: their answers are those of one thread, and take turns,
    because a device computes no faster for two. A session is used by one thread at a time.

    Attributes:
      model: open; its weights, runners and tokenizer are shared by all engines of it.
      level: that answers where a request names none, in percent.
      speculation: drafts the answers of this level; None for no drafts.
      grammars: compiles the grammars of answers.
    """

    def __init__(
        self,
        model: AnyModel,
        level: int = WHOLE,
        speculation: "Speculation | None" = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """See the class; `grammars` of another engine of the model, None for new ones.

        Raises:
          ConfigError: the model does not serve the level.
        """
        self.model, self.level, self.speculation = model, level, speculation
        self.runner: Any = model.runner(level)
        self.grammars = grammars or GrammarCompiler(model.tokenizer, self.runner.cfg.vocab_size)

    @classmethod
    def open(
        cls,
        model: str | Path | None = None,
        *,
        weights: WeightFormat | None = None,
        options: "EngineOptions | None" = None,
        adapter: str | Path | None = None,
        level: int = WHOLE,
        speculation: SpeculationOptions | None = None,
        warm_up: bool = True,
        progress: Progress | None = None,
    ) -> "Engine[LoadedModel]":
        """Opens a model and compiles its buckets.

        Args:
          model: a bundle, a Hugging Face folder or a GGUF file (prepared on the fly and cached), a packaged
            model's name, or None for the default one.
          weights: width for a folder's weights; None keeps the checkpoint's own.
          options: shapes of buckets and caches.
          adapter: a low-rank adapter in PEFT's layout to start with; its rank and targets are used unless the
            options name some.
          level: the sub-model of this engine (see `at`), in percent; added to the options' levels.
          speculation: how its answers are drafted; None for no drafts, `SpeculationOptions.by_itself()` where
            that can be and pays.
          warm_up: compile every bucket; else call `warm_up` before the first request.
          progress: called with (stage, done, total).

        Raises:
          JaxllmError: the model cannot be opened, or the options do not fit it.
        """
        # Here, because what loads bundles need not be imported for a program, nor the other way.
        from serving.loading import load_model

        loaded, speculation = load_model(
            model,
            weights=weights,
            options=options,
            adapter=adapter,
            level=level,
            speculation=speculation,
            progress=progress,
        )
        try:
            drafts = None
            if speculation is not None:
                # Here, because a start without drafts should not wait for their import.
                from serving.speculation.drafters import make_drafter
                from serving.speculation.speculation import Speculation

                drafter = make_drafter(loaded, level, speculation, progress)
                drafts = Speculation(loaded.runner(level), drafter, speculation)
            engine = Engine(loaded, level, drafts)
            if warm_up:
                engine.warm_up(progress=progress)
            return engine
        except BaseException:
            # Else its threads stay until this process ends.
            loaded.close()
            raise

    @classmethod
    def open_program(
        cls,
        folder: str | Path,
        *,
        level: int = WHOLE,
        threads: int = 0,
        speculation: SpeculationOptions | None = None,
    ) -> "Engine[ProgramModel]":
        """Opens a folder that `jaxllm export` wrote; `warm_up` or their first use compiles programs.

        Args:
          folder: the folder.
          level: the sub-model of this engine, in percent.
          threads: of LiteRT; 0 for all cores of this process.
          speculation: how its answers are drafted, where `model` is a folder of programs; None for no drafts.

        Raises:
          ProgramError: it is not a program folder, corrupt, or of other weights.
          ConfigError: its runtime is not installed, it lacks this level, or cannot verify drafts.
        """
        from serving.programs.model import open_program

        model = open_program(Path(folder), threads=threads)
        drafts = None if speculation is None else model.drafts(level, speculation, threads=threads)
        return Engine(model, level, drafts)

    # -- what it is -------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The model's name, for people."""
        return self.model.name

    @property
    def cfg(self) -> ModelConfig:
        """The model's config, or the sub-model's."""
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
        return Engine(self.model, level, grammars=self.grammars)

    def runner_at(self, level: int | None = None) -> Any:
        """The runner of a level; None for this engine's own.

        Raises:
          ConfigError: see `at`.
        """
        return self.runner if level is None or level == self.level else self.model.runner(level)

    def prefill_mode(self, tokens: int, level: int | None = None) -> str:
        """The prefill mode of a prompt of so many tokens at a level: "int8" or "float"."""
        return self.runner_at(level).prefill_chunks(tokens)[0].mode

    def warm_up(
        self,
        *,
        prompt_tokens: int | None = None,
        max_tokens: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """Compiles and rehearses all buckets and the chat template, or only compiles the buckets that one
        request needs.

        The whole model's engine does this for all levels, an engine at a level for that one. Buckets that an
        earlier process compiled are read from disk (see `EngineOptions.buckets_bytes`).

        Args:
          prompt_tokens: of that one request; None for all requests. Waits only for the buckets of its first
            token; the others are compiled in the background.
          max_tokens: of that one request; 0 where it is not known.
          progress: called with ("compile", buckets done, buckets in all).
        """
        with self.runner.lock:
            self.model.warm_up(
                self.level,
                self.speculation,
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                progress=progress,
            )
        if prompt_tokens is None:
            self.tokenizer.compile_chat_template()

    def set_adapter(self, folder: str | Path | None) -> None:
        """Puts a low-rank adapter on all levels, in place of the one before, without compiling.

        Sessions that continue afterwards are prefilled again: their cache is of other weights.

        Args:
          folder: in PEFT's layout; None for no adapter.

        Raises:
          ConfigError: the model was opened without `adapter_rank`, or for a lower one or other targets.
          CheckpointError: the folder is missing, corrupt or of another model.
        """
        self.model.set_adapter(folder)

    def close(self) -> None:
        """Closes the model: ends the threads that stream weights and the processors of prefill. It answers no
        more requests."""
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
        rows: PromptRows | None = None,
    ) -> Answer:
        """Answers a prompt: text (special tokens are added) or token ids.

        Args:
          prompt: what the model continues.
          config: length, stops and sampling of the answer.
          level: the sub-model that answers, in percent, one of `levels`; None for this engine's.
          session: a conversation whose cache is used and extended.
          sliding: how an answer that outgrows the context continues; None to end it there.
          tpot_ms: expected time per further token, if known; otherwise the second token is decoded alone to
            measure it.
          rows: that stand in place of some tokens of a prompt of ids, such as those of an image; the answer
            has no drafts. It takes `EngineOptions.prompt_rows`.

        Raises:
          ConfigError, ContextOverflow: the prompt is empty, malformed or too long, or the level is not
            served.
        """
        request = self.request(prompt, config, level=level, sliding=sliding, tpot_ms=tpot_ms, rows=rows)
        return self.submit(request, session=session)

    def generate(self, prompt: str | Sequence[int], config: GenerationConfig | None = None) -> Answer:
        """`stream`, run to the end."""
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
        and images (see `serving.images.messages.taken_apart`)."""
        tokenizer, rows = self.tokenizer.limited(self.options.context_tokens), None
        if self.cfg.encoder is not None:
            task = "" if config is None else config.task
            prompt = prompt_ids(tokenizer, source_prompt(messages, task=task))
        else:
            plain, files = taken_apart(messages)
            prompt, rows = self.image_rows(tokenizer.encode_chat(plain, now=datetime.now()), files)
        return self.stream(prompt, config, session=session, rows=rows)

    def image_rows(self, prompt: Sequence[int], files: Sequence[bytes]) -> ImagePrompt:
        """For `stream`: a prompt's ids, of which one `<image>` stands for each image's file, and their rows.

        Raises:
          ConfigError, ContextOverflow: the model reads no images, or these cannot be read, or do not fit.
        """
        if not files:
            return list(prompt), None
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
        rows: PromptRows | None = None,
        source: Sequence[int] | None = None,
    ) -> Request:
        """Makes a request of this engine (see `stream`): encodes text, and draws a seed where none is given.
        With the `source` of an encoder-decoder the prompt is the ids that its decoder has so far.

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
            seed=secrets.randbits(64) if seed is None else seed,
            level=runner.level,
            drafted=self.speculation is not None
            and runner is self.runner
            and not config.guided
            and rows is None,
            sliding=sliding,
            tpot_ms=tpot_ms,
            source=None if source is None else tuple(source),
            begun=begun,
            rows=rows,
        )

    def decoding(self, request: Request) -> Decoding:
        """The way to decode one answer's tokens.

        Raises:
          ConfigError: the request's grammar cannot be used, or log-probabilities not be told.
        """
        config = request.config
        if config.guided:
            matcher = None
            if config.grammar is not None:
                stop_ids = config.stop_ids(self.tokenizer.eos_ids)
                matcher = self.grammars.matcher(config.grammar, stop_ids)
            return GuidedDecoding(self.runner_at(request.level), matcher, config.top_logprobs)
        if (drafts := self.speculation) is not None and request.drafted:
            return drafts if request.source is None else drafts.of(request.source)
        return PlainDecoding(self.runner_at(request.level))

    def submit(self, request: Request, *, session: Session | None = None) -> Answer:
        """Makes the answer of a request, which waits for its first step.

        Args:
          request: to answer.
          session: a conversation whose cache is used and extended.

        Raises:
          ConfigError, ContextOverflow: see `Request.require_served_by`.
        """
        return Answer(self.decoding(request), self.tokenizer, request, session=session)
