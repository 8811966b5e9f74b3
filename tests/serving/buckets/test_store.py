"""Tests the keys of compiled buckets on disk, and engines that find theirs."""

import dataclasses
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
import pytest

import jaxllm
import jaxllm.serving.buckets.store
from jaxllm import Engine, EngineOptions, GenerationConfig
from jaxllm.config import RopeConfig
from jaxllm.quant import quantize
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.buckets.model import BatchBucket, DecodeBucket, PrefillBucket, SampleBucket, StartBucket
from jaxllm.serving.buckets.store import (
    BucketStore,
    CompiledBucketFolder,
    environment_facts,
    params_digest,
    source_digest,
)
from jaxllm.serving.engine.request import Session
from jaxllm.serving.engine.step import batchable, decode_together, step
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.serving.runners.scorer import ScoreBucket
from tests.kernels.switching import needs_native
from tests.tiny import TINY, random_params, write_tiny_bundle

pytestmark = pytest.mark.usefixtures("own_compilations")

# Few and short, so that an engine is quickly built.
OPTIONS = EngineOptions(context_tokens=32, chunk_tokens=(16,), cache_tokens=(32,), decode_block=4)
BUCKET = PrefillBucket(tokens=16, cache_tokens=64)
FOLDER = CompiledBucketFolder(Path("nowhere"), limit_bytes=0)
PROMPT = [5, 9, 2, 44, 17]
CONFIG = GenerationConfig(max_tokens=12, ignore_eos=True)


# The key.


def key(**change: Any) -> str:
    bucket = change.pop("bucket", BUCKET)
    facts = dict(cfg=TINY, options=OPTIONS, params={"p": np.zeros(3, np.float32)}, kernels="k")
    return BucketStore.of_model(FOLDER, **(facts | change)).key(bucket)


def test_what_a_bucket_depends_on_changes_its_key():
    base = key()
    assert len(bytes.fromhex(base)) == 32
    # Where buckets are kept does not.
    assert key() == base == key(options=dataclasses.replace(OPTIONS, buckets_bytes=7))
    changes = [
        dict(params={"q": np.zeros(3, np.float32)}),
        dict(kernels="l"),
        dict(bucket=ScoreBucket(tokens=16, cache_tokens=64)),
    ]
    changes += [
        {name: dataclasses.replace(whole, **change)}
        for name, whole, *some in (
            ("bucket", BUCKET, dict(tokens=32), dict(cache_tokens=65), dict(level=50)),
            (
                "cfg", TINY, dict(norm_eps=1e-6), dict(rope=None), dict(rope=RopeConfig(dim=16, theta=1e6)),
                dict(attention_windows=(0, 8)), dict(logit_softcap=30.0),
            ),
            (
                "options", OPTIONS, dict(activation_dtype="bfloat16"), dict(decode_block=5),
                dict(chunk_tokens=(16, 32)), dict(cache_tokens=(16, 32)), dict(context_tokens=31),
            ),
        )
        for change in some
    ]  # fmt: skip
    assert len({base, *(key(**change) for change in changes)}) == 1 + len(changes) == 17


def test_parameters_are_told_apart_by_name_shape_dtype_and_structure():
    rows = np.ones((64, 64), np.float32)
    different = [
        {"a": rows},
        {"b": rows},
        {"a": rows, "b": rows},
        {"a": rows[:32]},
        {"a": rows.reshape(-1)},
        {"a": rows.astype(np.float16)},
        {"a": (rows,)},
        {"a": [rows]},
        {"a": quantize(rows, bits=8, axis=-1)},
        {"a": quantize(rows, bits=8, axis=-2)},
        {"a": quantize(rows, bits=4, axis=-1)},
        # A field that is no array: it changes nothing but the structure.
        {"a": dataclasses.replace(quantize(rows, bits=4, axis=-1), columns=63)},
    ]
    assert len({params_digest(params) for params in different}) == len(different)
    assert params_digest({"a": rows}) == params_digest({"a": 2 * rows})


def other_device(patch: pytest.MonkeyPatch, **change: Any) -> None:
    """A device like the real one but for some facts."""
    real = jax.devices()[0]
    names = ("platform", "device_kind", "id", "client")
    device = types.SimpleNamespace(**{name: getattr(real, name) for name in names} | change)
    patch.setattr(jax, "devices", lambda: [device])


CIRCUMSTANCES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "jaxllm": lambda patch: patch.setattr(jaxllm.serving.buckets.store, "__version__", "9"),
    "source": lambda patch: patch.setattr(jaxllm.serving.buckets.store, "_SOURCE_DIGEST", "9"),
    "python": lambda patch: patch.setattr("sys.version_info", (3, 99, 0, "final", 0)),
    "interpreter": lambda patch: patch.setattr("sys.implementation.cache_tag", "other"),
    "jax": lambda patch: patch.setattr(jax, "__version__", "9"),
    "jaxlib": lambda patch: patch.setattr(jaxlib, "__version__", "9"),
    "numpy": lambda patch: patch.setattr(np, "__version__", "9"),
    "XLA_FLAGS": lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_use_xnnpack=true"),
    "kernels": lambda patch: patch.setenv("JAXLLM_KERNELS", "others"),
    "platform": lambda patch: other_device(patch, platform="gpu"),
    "device": lambda patch: other_device(patch, device_kind="H200"),
    "driver": lambda patch: other_device(patch, client=types.SimpleNamespace(platform_version="12.9")),
    "devices": lambda patch: patch.setattr(jax, "device_count", lambda: 3),
    "cores": lambda patch: patch.setattr(jaxllm.serving.buckets.store, "usable_cores", lambda: 77),
    "cpu": lambda patch: patch.setattr(jaxllm.serving.buckets.store, "cpu_features", lambda: ["flags: mmx"]),
}


@pytest.mark.parametrize("change", CIRCUMSTANCES.values(), ids=CIRCUMSTANCES)
def test_circumstances_that_change_buckets_are_told_apart(monkeypatch, change):
    before = environment_facts()
    assert environment_facts() == before
    change(monkeypatch)
    assert environment_facts() != before


@pytest.mark.parametrize(
    ("setting", "value", "counts"),
    [
        ("jax_default_matmul_precision", "highest", True),
        ("jax_threefry_partitionable", False, True),
        ("jax_log_compiles", True, False),
    ],
)
def test_settings_of_jax_are_told_apart_but_for_logs(setting, value, counts):
    before, old = environment_facts(), jax.config.values[setting]
    jax.config.update(setting, value)
    try:
        assert (environment_facts() != before) == counts
    finally:
        jax.config.update(setting, old)


def test_the_source_is_told_apart_by_place_and_content(tmp_path: Path):
    def digest(**files: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in files.items():
            path = folder / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return source_digest(str(folder))

    base = digest(a_dot_py="1", b__c_dot_py="2")
    assert base == digest(a_dot_py="1", b__c_dot_py="2", README_dot_md="3")
    assert base != digest(a_dot_py="1", b__c_dot_py="3")
    assert base != digest(a_dot_py="1", c_dot_py="2")
    assert base != digest(a_dot_py="12", b__c_dot_py="")
    assert base != digest(a_dot_py="1", b__c_dot_py="2", kernels_dot_abi3_dot_so="3")
    # Ours is all that a bucket is made from.
    root = Path(jaxllm.__file__).parent
    modules = {*jaxllm.serving.buckets.store._modules(str(root))}
    parts = ("steps/model", "models/layer", "models/decoder", "kernels/native", "serving/runners/resident")
    assert {str(root / f"{part}.py") for part in parts} <= modules
    assert all("__pycache__" not in path for path in modules)


# Engines.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of the executables in a cache of this test's own, switched on."""
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXLLM_BUCKETS_BYTES")
    return tmp_path / "cache" / "executables"


@pytest.fixture(scope="module")
def first(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Path]:
    """An engine that found no buckets, and where it left its own."""
    home = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_CACHE", str(home))
        patch.delenv("JAXLLM_BUCKETS_BYTES")
        return started(tiny_bundle), home / "executables"


@pytest.fixture
def filled(cache: Path, first: tuple[Engine, Path]) -> Path:
    """A copy of what the first engine left."""
    shutil.copytree(first[1], cache)
    return cache


def started(bundle: Path, families: tuple[type[Bucket], ...] = (Bucket,), **options: Any) -> Engine:
    """An engine with buckets of these families, or with all."""
    engine = Engine.open(bundle, options=dataclasses.replace(OPTIONS, **options), warm_up=False)
    engine.runner.fill(each for each in engine.runner.buckets_for() if isinstance(each, families))
    return engine


def test_a_second_engine_compiles_nothing_and_says_the_same_to_the_bit(tiny_bundle, first, filled, compiles):
    engine, _ = first
    assert engine.runner.buckets.loaded == set()
    with compiles() as count:
        second = started(tiny_bundle)
        answers = []
        for each in (engine, second):
            session = Session()
            opening = each.stream(PROMPT, CONFIG, session=session).result()
            turn = each.stream([*PROMPT, *opening.tokens, 7], CONFIG, session=session).result()
            answers.append((opening.tokens, turn.tokens, turn.reused_tokens))
    assert answers[0] == answers[1]
    assert count() == 0
    buckets = second.runner.buckets
    assert buckets.loaded == set(second.runner.buckets_for()) == set(buckets.bucket_ms)
    assert len(list(filled.iterdir())) == len(engine.runner.buckets_for())
    logits = [prefill_prompt(each.runner, each.runner.start(9), PROMPT, 0)[0] for each in (engine, second)]
    assert np.asarray(logits[0]).tobytes() == np.asarray(logits[1]).tobytes()
    # It updates its cache in place.
    before = second.runner.start(9)
    places = [rows.unsafe_buffer_pointer() for rows in (*before.keys, *before.values)]
    _, after = prefill_prompt(second.runner, before, PROMPT, 0)
    assert [rows.unsafe_buffer_pointer() for rows in (*after.keys, *after.values)] == places
    assert all(rows.is_deleted() for rows in before.keys)
    for bucket in (each for each in buckets.loaded if isinstance(each, PrefillBucket | DecodeBucket)):
        memory = buckets.get(bucket).memory_analysis()
        assert memory.alias_size_in_bytes >= sum(rows.nbytes for rows in (*after.keys, *after.values))


def test_a_start_reads_ahead_what_a_short_request_needs(tiny_bundle, filled, compiles):
    with compiles() as count:
        buckets = Engine.open(tiny_bundle, options=OPTIONS, warm_up=False).runner.buckets
        ahead = dict(buckets._ahead)
        assert {type(each) for each in ahead} == {PrefillBucket, SampleBucket, StartBucket, DecodeBucket}
        # Only what is asked for is there, and the rest is released.
        buckets.fill([SampleBucket()])
        assert buckets.loaded == set(buckets.bucket_ms) == {SampleBucket()}
        assert buckets.get(SampleBucket()) is ahead[SampleBucket()].result()
        assert not buckets._ahead
    assert count() == 0


@pytest.mark.parametrize("how", ["option", "environment"])
def test_the_switch(tiny_bundle, cache, monkeypatch, how):
    if how == "environment":
        monkeypatch.setenv("JAXLLM_BUCKETS_BYTES", "0")
    off = dict(buckets_bytes=0) if how == "option" else {}
    for _ in range(2):
        assert started(tiny_bundle, (StartBucket,), **off).runner.buckets.loaded == set()
    assert not cache.exists()
    # An option goes before the environment.
    monkeypatch.setenv("JAXLLM_BUCKETS_BYTES", "0")
    started(tiny_bundle, (StartBucket,), buckets_bytes=1 << 20)
    assert len(list(cache.iterdir())) == 1


def test_weights_of_one_shape_share_buckets_and_others_do_not(tiny_bundle, tmp_path, filled):
    other = write_tiny_bundle(tmp_path / "other", params=random_params(TINY, seed=3))
    engine = started(other)
    assert engine.runner.buckets.loaded == set(engine.runner.buckets_for())
    narrow = started(write_tiny_bundle(tmp_path / "narrow", "int8"), (StartBucket,))
    assert narrow.runner.buckets.loaded == set()


# Buckets of batches: made where options ask for them.
BATCHES = EngineOptions(
    context_tokens=32, chunk_tokens=(16,), decode_block=4, batch_rows=(2,), buckets_bytes=1 << 30
)
PAIR = BatchBucket(rows=2, block_tokens=4, cache_tokens=32)


def decoded(engine):
    config = GenerationConfig(max_tokens=4, ignore_eos=True)
    runs = [engine.stream([at, 3], config) for at in (5, 9)]
    while not all(map(batchable, runs)):
        step(*(run for run in runs if not batchable(run)))
    decode_together(runs, most_tokens=3)
    return [run.tokens for run in runs], [engine.generate([at, 3], config).tokens for at in (5, 9)]


@needs_native
def test_a_bucket_is_kept_and_found_whatever_batches_are_asked_for(tmp_path, monkeypatch, compiles):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm", "int8")
    first = Engine.open(path, options=BATCHES)
    buckets = first.model.runners.buckets
    assert PAIR in buckets.bucket_ms
    assert PAIR not in buckets.loaded
    expected, alone = decoded(first)
    assert expected == alone
    with compiles() as count:
        again = Engine.open(path, options=BATCHES)
    assert (count(), PAIR in again.model.runners.buckets.loaded) == (0, True)
    assert decoded(again)[0] == expected
    without = Engine.open(path, options=dataclasses.replace(BATCHES, batch_rows=()))
    assert without.model.facts()["compiled_buckets"] == 0
    assert PAIR not in without.model.runners.buckets
