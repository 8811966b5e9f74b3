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
from jaxllm.serving.buckets.compiled_folder import CompiledBucketFolder
from jaxllm.serving.buckets.store import BucketStore

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


def test_buckets_of_different_families_are_different():
    buckets = BucketTable(Shapes(5))
    buckets.fill([TWO, PlusBucket(size=2)])
    assert PlusBucket(size=2) != TWO
    assert buckets.get(TWO)(ones(2)).tolist() == [5, 5]
    assert buckets.get(PlusBucket(size=2))(ones(2)).tolist() == [6, 6]


def test_each_bucket_is_compiled_once_and_counted():
    model, told = Shapes(2), []
    buckets = BucketTable(model)
    buckets.fill([TWO, TWO, THREE], lambda *each: told.append(each))
    buckets.fill([THREE])
    assert model.lowered == 2
    assert set(buckets.bucket_ms) == {TWO, THREE}
    assert buckets.loaded == set()
    assert told[-1] == ("compile", 2, 2)
    assert buckets.build_ms > 0


def test_one_that_was_not_asked_for_is_refused():
    buckets = BucketTable(Shapes(2))
    buckets.fill([TWO])
    assert TWO in buckets
    assert THREE not in buckets
    with pytest.raises(BucketMissing, match=r"TimesBucket\(level=100, size=3\)"):
        buckets.get(THREE)


def test_levels_are_lowered_from_their_own_models():
    buckets = BucketTable(Shapes(2))
    buckets.add_level(50, Shapes(7))
    half = dataclasses.replace(TWO, level=50)
    buckets.fill([TWO, half])
    assert buckets.get(TWO)(ones(2)).tolist() == [2, 2]
    assert buckets.get(half)(ones(2)).tolist() == [7, 7]


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


def test_one_that_failed_may_be_asked_for_again():
    model = Shapes(2, fails=True)
    buckets = BucketTable(model)
    with pytest.raises(RuntimeError, match="out of memory"):
        buckets.fill([TWO])
    concurrent.futures.wait(buckets._pending.values())
    model.fails = False
    buckets.fill([TWO])
    assert buckets.get(TWO)(ones(2)).tolist() == [2, 2]


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


def test_a_closed_table_gives_nothing():
    buckets = BucketTable(Shapes(2))
    buckets.fill([TWO])
    buckets.close()
    with pytest.raises(JaxllmError, match="closed"):
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
