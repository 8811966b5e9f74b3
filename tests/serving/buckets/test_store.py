"""Tests the bucket table, the keys of compiled buckets on disk, and engines that find theirs."""

import concurrent.futures
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
from jaxllm import Engine, EngineOptions, GenerationConfig
from jaxllm.config import RopeConfig
from jaxllm.errors import BucketMissing, JaxllmError
from jaxllm.quant import quantize
from jaxllm.serving.buckets import bucket_table
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.buckets.bucket_table import (
    BucketStore,
    BucketTable,
    CompiledBucketFolder,
    environment_facts,
    params_digest,
    source_digest,
)
from jaxllm.serving.buckets.model import DecodeBucket, PrefillBucket, SampleBucket, StartBucket
from jaxllm.serving.engine.request import Session
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.serving.runners.scorer import ScoreBucket
from tests.tiny import TINY

pytestmark = pytest.mark.usefixtures("own_compilations")

# Few and short, so that an engine is quickly built.
OPTIONS = EngineOptions(context_tokens=32, chunk_tokens=(16,), cache_tokens=(32,), decode_block=4)
BUCKET = PrefillBucket(tokens=16, cache_tokens=64)
FOLDER = CompiledBucketFolder(Path("nowhere"), limit_bytes=0)
PROMPT = [5, 9, 2, 44, 17]
CONFIG = GenerationConfig(max_tokens=12, ignore_eos=True)


# The table: it compiles what it is asked for, once, and gives nothing else.


@dataclasses.dataclass
class Shapes:
    """What the buckets of these tests are lowered from, and how often."""

    factor: int
    lowered: int = 0
    fails: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimesBucket(Bucket):
    """Multiplies by the level's factor."""

    size: int

    def lower(self, model: Shapes, /) -> jax.stages.Lowered:
        """(x) -> product."""
        model.lowered += 1
        if model.fails:
            raise RuntimeError("out of memory")
        return jax.jit(lambda x: x * model.factor).lower(np.zeros(self.size, np.float32))


class PlusBucket(TimesBucket):
    """Another family with the same fields."""

    def lower(self, model: Shapes, /) -> jax.stages.Lowered:
        """(x) -> sum."""
        return jax.jit(lambda x: x + model.factor).lower(np.zeros(self.size, np.float32))


def test_a_table_compiles_each_bucket_once_and_gives_nothing_else():
    two, three, calls = TimesBucket(size=2), TimesBucket(size=3), []
    model = Shapes(5, fails=True)
    buckets, plus, half = BucketTable(model), PlusBucket(size=2), dataclasses.replace(two, level=50)
    buckets.add_level(50, Shapes(7))
    with pytest.raises(RuntimeError, match="out of memory"):
        buckets.fill([two])
    # One that failed may be asked for again.
    concurrent.futures.wait(buckets._pending.values())
    model.fails, model.lowered = False, 0
    # Families with equal fields are different, and levels are lowered from their own models.
    buckets.fill([two, two, plus, half], lambda *each: calls.append(each))
    buckets.fill([two])
    assert (model.lowered, set(buckets.bucket_ms), buckets.loaded) == (1, {two, plus, half}, set())
    assert calls[-1] == ("compile", 3, 3)
    x = np.ones(2, np.float32)
    assert [buckets.get(each)(x).tolist() for each in (two, plus, half)] == [[5, 5], [6, 6], [7, 7]]
    assert (two in buckets, three in buckets) == (True, False)
    with pytest.raises(BucketMissing, match=r"TimesBucket\(level=100, size=3\)"):
        buckets.get(three)
    buckets.close()
    with pytest.raises(JaxllmError, match="closed"):
        buckets.get(two)


# The key.


def key(**change: Any) -> str:
    bucket = change.pop("bucket", BUCKET)
    facts = dict(cfg=TINY, options=OPTIONS, params={"p": np.zeros(3, np.float32)}, kernels="k")
    return BucketStore.of_model(FOLDER, **(facts | change)).key(bucket)


def test_what_a_bucket_depends_on_changes_its_key():
    base = key()
    assert len(bytes.fromhex(base)) == 32
    # Where buckets are kept, and which batches are asked for, does not.
    assert key() == base == key(options=dataclasses.replace(OPTIONS, buckets_bytes=7, batch_rows=(2,)))
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
        {"a": rows.astype(np.float16)},
        {"a": (rows,)},
        {"a": quantize(rows, bits=8, axis=-1)},
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
    "jaxllm": lambda patch: patch.setattr(bucket_table, "__version__", "9"),
    "source": lambda patch: patch.setattr(bucket_table, "_SOURCE_DIGEST", "9"),
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
    "cores": lambda patch: patch.setattr(bucket_table, "usable_cores", lambda: 77),
    "cpu": lambda patch: patch.setattr(bucket_table, "cpu_features", lambda: ["flags: mmx"]),
}


def test_circumstances_that_change_buckets_are_told_apart(monkeypatch):
    before = environment_facts()
    for name, change in CIRCUMSTANCES.items():
        with monkeypatch.context() as patch:
            change(patch)
            assert environment_facts() != before, name
        assert environment_facts() == before
    # Settings of JAX count, too, but for logs.
    for setting, value, counts in (
        ("jax_threefry_partitionable", False, True),
        ("jax_log_compiles", True, False),
    ):
        old = jax.config.values[setting]
        jax.config.update(setting, value)
        try:
            assert (environment_facts() != before) == counts
        finally:
            jax.config.update(setting, old)


def test_the_source_is_told_apart_by_place_and_content(tmp_path: Path):
    def digest(files: dict[str, str]) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return source_digest(str(folder))

    files = {"a.py": "1", "b/c.py": "2"}
    others = [{"b/c.py": "3"}, {"b/c.py": "", "a.py": "12"}, {"kernels.abi3.so": "3"}, {"c.py": "2"}]
    digests = {digest(files), digest(files | {"README.md": "3"})}
    assert len(digests) == 1
    assert len(digests | {digest(files | other) for other in others}) == 5
    # Ours is all that a bucket is made from.
    root = Path(jaxllm.__file__).parent
    modules = {*bucket_table._modules(str(root))}
    parts = ("steps/model", "models/layer", "kernels/native", "serving/runners/resident")
    assert {str(root / f"{part}.py") for part in parts} <= modules
    assert all("__pycache__" not in path for path in modules)


# Engines.


@pytest.fixture(scope="module")
def first(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Path]:
    """An engine that found no buckets, and where it left its own."""
    home = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_CACHE", str(home))
        patch.delenv("JAXLLM_BUCKETS_BYTES")
        return started(tiny_bundle), home / "executables"


@pytest.fixture
def filled(first: tuple[Engine, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what the first engine left, in a cache of this test's own."""
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXLLM_BUCKETS_BYTES")
    return Path(shutil.copytree(first[1], tmp_path / "cache" / "executables"))


def started(bundle: Path) -> Engine:
    """An engine with all of its buckets."""
    engine = Engine.open(bundle, options=OPTIONS, warm_up=False)
    engine.runner.fill(engine.runner.buckets_for())
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
