"""The bucket table compiles what it is asked for, once, and gives nothing else."""

import concurrent.futures
import dataclasses
import threading

import jax
import numpy as np
import pytest

from jaxllm.errors import BucketMissing, ConfigError, JaxllmError
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.buckets.store import BucketStore, CompiledBucketFolder

pytestmark = pytest.mark.usefixtures("own_compilations")


@dataclasses.dataclass
class Shapes:
    """What the buckets of these tests are lowered from, and how often."""

    factor: int
    lowered: int = 0
    fails: bool = False
    may_go_on: threading.Event | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimesBucket(Bucket):
    """Multiplies by the level's factor."""

    size: int

    def lower(self, model: Shapes, /) -> jax.stages.Lowered:
        """(x) -> product."""
        model.lowered += 1
        if model.may_go_on is not None:
            assert model.may_go_on.wait(60)
        if model.fails:
            raise RuntimeError("out of memory")
        return jax.jit(lambda x: x * model.factor).lower(np.zeros(self.size, np.float32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlusBucket(Bucket):
    """Another family with the same fields."""

    size: int

    def lower(self, model: Shapes, /) -> jax.stages.Lowered:
        """(x) -> sum."""
        return jax.jit(lambda x: x + model.factor).lower(np.zeros(self.size, np.float32))


TWO, THREE = TimesBucket(size=2), TimesBucket(size=3)


def ones(size: int) -> np.ndarray:
    return np.ones(size, np.float32)


def test_a_table_gives_what_it_was_asked_for_and_nothing_else():
    """Families with equal fields are different, and levels are lowered from their own models."""
    buckets, plus, half = BucketTable(Shapes(5)), PlusBucket(size=2), dataclasses.replace(TWO, level=50)
    buckets.add_level(50, Shapes(7))
    buckets.fill([TWO, plus, half])
    assert plus != TWO
    assert [buckets.get(each)(ones(2)).tolist() for each in (TWO, plus, half)] == [[5, 5], [6, 6], [7, 7]]
    assert TWO in buckets
    assert THREE not in buckets
    with pytest.raises(BucketMissing, match=r"TimesBucket\(level=100, size=3\)"):
        buckets.get(THREE)
    buckets.close()
    with pytest.raises(JaxllmError, match="closed"):
        buckets.get(TWO)


def test_each_bucket_is_compiled_once_and_counted():
    model, told = Shapes(2, fails=True), []
    buckets = BucketTable(model)
    with pytest.raises(RuntimeError, match="out of memory"):
        buckets.fill([TWO])
    # One that failed may be asked for again.
    concurrent.futures.wait(buckets._pending.values())
    model.fails, model.lowered = False, 0
    buckets.fill([TWO, TWO, THREE], lambda *each: told.append(each))
    buckets.fill([THREE])
    assert (model.lowered, set(buckets.bucket_ms), buckets.loaded) == (2, {TWO, THREE}, set())
    assert told[-1] == ("compile", 2, 2)
    assert buckets.build_ms > 0
    assert buckets.get(TWO)(ones(2)).tolist() == [2, 2]


def test_what_is_needed_later_is_waited_for_when_it_is_needed():
    buckets, slow = BucketTable(Shapes(2)), Shapes(3, may_go_on=threading.Event())
    buckets.add_level(50, slow)
    half = dataclasses.replace(TWO, level=50)
    buckets.fill([TWO], later=[half])
    assert half in buckets
    assert not buckets.is_ready(half)
    assert slow.may_go_on is not None
    slow.may_go_on.set()
    assert buckets.get(half)(ones(2)).tolist() == [3, 3]
    assert buckets.is_ready(half)


def test_a_thread_may_compile_for_itself():
    """What is set for the thread alone holds for what it compiles."""
    threads, buckets = [], BucketTable(Shapes(2))
    build = buckets._build
    buckets._build = lambda bucket: (threads.append(threading.current_thread()), build(bucket))[1]
    buckets.fill_here([TWO])
    buckets.fill([THREE])
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()
    assert set(buckets.bucket_ms) == {TWO, THREE}


def test_guards_are_asked_before_each_bucket():
    buckets, asked = BucketTable(Shapes(2)), []
    buckets.fill([TWO])
    buckets.guard(lambda: asked.append(1))
    buckets.get(TWO)
    buckets.require_usable()
    assert len(asked) == 2

    def refuse() -> None:
        raise ConfigError("the file was changed")

    buckets.guard(refuse)
    with pytest.raises(ConfigError, match="was changed"):
        buckets.get(TWO)


def test_what_one_table_kept_the_next_one_reads(tmp_path):
    store = BucketStore(CompiledBucketFolder(tmp_path / "kept", limit_bytes=1 << 24), {"of": "these tests"})
    models = [Shapes(2), Shapes(2)]
    for model in models:
        buckets = BucketTable(model, store)
        buckets.fill([TWO])
        assert buckets.get(TWO)(ones(2)).tolist() == [2, 2]
    assert [model.lowered for model in models] == [1, 0]
    assert buckets.loaded == {TWO}
    # Another level's are others, and those of other facts, too.
    assert store.load(dataclasses.replace(TWO, level=50)) is None
    assert dataclasses.replace(store, facts={"of": "others"}).load(TWO) is None
