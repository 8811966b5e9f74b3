"""Uses of each kind of file as a person or a service would use it; run by the worker.

Each ends in peace, raises one of the project's own errors, or fails an assertion where what came out is
untrue.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.export.programs.model import open_program
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.options import EngineOptions
from tests.torture.process import Case
from tests.torture.victims import CONTEXT_TOKENS, FACTS, PROMPT, WITHOUT_FILES

_CONFIG = GenerationConfig(max_tokens=3, ignore_eos=True)
_OPTIONS = EngineOptions(
    context_tokens=CONTEXT_TOKENS, cache_tokens=(CONTEXT_TOKENS,), chunk_tokens=(16,), decode_block=4,
    buckets_bytes=0,
)  # fmt: skip


def _answer(engine: Engine) -> list[int]:
    try:
        answer = engine.stream(PROMPT, _CONFIG)
        engine.warm_up(prompt_tokens=answer.prompt_tokens, max_tokens=_CONFIG.max_tokens)
        return list(answer.result().tokens)
    finally:
        engine.close()


def use_bundle(case: Case) -> None:
    """Reads all of a bundle; answers with it, at its smallest level too."""
    from jaxllm.bundle.calibrations import read_path_counts, read_prefill, read_token_experts
    from jaxllm.bundle.levels import read_ladder, read_order
    from jaxllm.bundle.tiny_lm import read_tiny_lm

    file = case.path / "model.jaxllm"
    with Bundle.open(file) as bundle:
        bundle.tokenizer_files()
        ladder = read_ladder(bundle)
        read_order(bundle)
        read_prefill(bundle)
        if bundle.cfg.experts:
            read_path_counts(bundle)
            read_token_experts(bundle)
        read_tiny_lm(bundle)
        bundle.load()
        bundle.verify()
    if case.deep:
        _answer(Engine.open(file, options=_OPTIONS, warm_up=False))
        if ladder is not None:
            _answer(Engine.open(file, options=_OPTIONS, level=ladder.levels[0], warm_up=False))


def use_tokenizer(case: Case) -> None:
    """Encodes and decodes by a folder's tokenizer, and puts a conversation into its template."""
    import datetime

    from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
    from jaxllm.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(read_tokenizer(case.path))
    for text in ("Once upon a time", "hello oooooooooooooooooooooooo 12 \u00e9\u4e2d", ""):
        tokenizer.decode(tokenizer.encode(text))
    if tokenizer.files.chat_template is not None:
        messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
        tokenizer.encode_chat(messages, now=datetime.datetime(2026, 1, 1))


def use_folder(case: Case) -> None:
    """Prepares a Hugging Face folder: a whole bundle or none; answers with it."""
    from jaxllm.prepare import prepare

    out = case.victims / f"{case.path.name}.jaxllm"
    out.unlink(missing_ok=True)
    try:
        prepare(case.path, out, weights="int8" if case.deep else "f32")
    except BaseException:
        left = [
            each.name for each in case.victims.iterdir() if each.name.startswith((f".{out.name}", out.name))
        ]
        assert not left, f"left behind: {left}"
        raise
    with Bundle.open(out) as bundle:
        bundle.verify()
    if case.deep:
        _answer(Engine.open(out, options=_OPTIONS, warm_up=False))


@functools.cache
def _facts(victims: Path) -> dict[str, object]:
    return json.loads((victims / FACTS).read_text())


def use_adapter(case: Case) -> None:
    """Reads an adapter for the model it was made for; answers with it."""
    from jaxllm.checkpoints.peft import read_adapter

    file = case.victims / WITHOUT_FILES / "model.jaxllm"
    with Bundle.open(file) as bundle:
        read_adapter(case.path, bundle.cfg)
    if case.deep:
        engine = Engine.open(file, options=dataclasses.replace(_OPTIONS, adapter_rank=4), warm_up=False)
        try:
            engine.set_adapter(case.path)
        except BaseException:
            engine.close()
            raise
        _answer(engine)


def use_trace(case: Case) -> None:
    """Reads a trace of requests."""
    from benchmarks.traces import read_trace

    read_trace(case.path / "trace.jsonl")


def use_profile(case: Case) -> None:
    """Reads a device's profile and asks it for times."""
    from jaxllm.serving.elastic.profile import load_profile

    profile = load_profile(case.path / "profile.json")
    if profile is not None:
        profile.ttfts(profile.levels, (1, 10, 100, profile.tokens[-1], 1000))
        profile.tpots(profile.levels, (1, 10, 1000))


def use_recipe(case: Case) -> None:
    """Reads a recipe of each kind."""
    from jaxllm.training.decoders import PretrainRecipe
    from jaxllm.training.elastic.job import ElasticRecipe

    PretrainRecipe.load(str(case.path / "pretrain" / "draft.toml"))
    ElasticRecipe.load(str(case.path / "elastic" / "family.toml"))


def use_tasks(case: Case) -> None:
    """Reads questions as `jaxllm eval` does."""
    from jaxllm.tasks import find_task

    for name in ("sentiment", "news", "chat-summary", "ui-step"):
        list(find_task(name).read(case.path, "valid"))


def use_program(case: Case) -> None:
    """Opens exported programs; answers with them."""

    engine = open_program(case.path)
    if case.deep:
        answer = engine.stream(PROMPT, _CONFIG)
        engine.warm_up(prompt_tokens=answer.prompt_tokens, max_tokens=_CONFIG.max_tokens)
        answer.result()


def use_graphs(case: Case) -> None:
    """Opens an engine whose kept graphs were harmed: it compiles instead, and says what it always says."""
    options = dataclasses.replace(_OPTIONS, buckets_bytes=1 << 28)
    file = case.victims / WITHOUT_FILES / "model.jaxllm"
    before = os.environ["JAXLLM_CACHE"]
    os.environ["JAXLLM_CACHE"] = str(case.path)
    try:
        tokens = _answer(Engine.open(file, options=options, warm_up=False))
    finally:
        os.environ["JAXLLM_CACHE"] = before
    wanted = _facts(case.victims)["graphs"]
    assert tokens == wanted, f"answers {tokens}, not {wanted}"


@functools.cache
def context_engine(file: Path) -> Engine:
    """The engine of contexts, opened once in a process."""
    return Engine.open(file, options=dataclasses.replace(_OPTIONS, kv_codec="raw"))


def use_contexts(case: Case) -> None:
    """Opens a store, reads and verifies all, repairs it; what is called whole goes on as it should."""
    from jaxllm.contexts.recompute import LOST
    from jaxllm.errors import JaxllmError
    from jaxllm.serving.contexts.context import Context
    from jaxllm.serving.contexts.manager import Contexts
    from jaxllm.serving.contexts.options import ContextOptions
    from jaxllm.serving.contexts.store import ContextStore

    store_folder = case.path / "store"
    said = _facts(case.victims)["contexts"]
    with ContextStore(store_folder) as store:
        damaged = {each.name for each in store.verify()}
        for record in store.records():
            if record.name not in damaged and not case.forged:
                assert list(record.tokens) == said.get(record.name), f"{record.name} has other tokens"
            try:
                stored = store.open(record.name)
                for layer in range(stored.layers):
                    stored.read(layer, [n for n, bits in enumerate(record.bits) if bits != LOST])
            except JaxllmError:
                pass
        store.verify(repair=True)
    if case.deep:
        engine = context_engine(case.victims / WITHOUT_FILES / "model.jaxllm")
        contexts = Contexts(engine, ContextOptions(folder=store_folder))
        try:
            for record in contexts.store.records():
                try:
                    context = Context(contexts, contexts.record(record.app, record.name))
                    tokens = list(context.tokens)
                    answer = context.generate([5], max_tokens=3, ignore_eos=True).result()
                except JaxllmError:
                    continue
                wanted = engine.generate([*tokens, 5], _CONFIG).tokens
                assert answer.tokens == wanted, f"{record.name} goes on otherwise"
        finally:
            contexts.close()


USES: dict[str, Callable[[Case], None]] = {
    name.removeprefix("use_"): use for name, use in list(globals().items()) if name.startswith("use_")
}
