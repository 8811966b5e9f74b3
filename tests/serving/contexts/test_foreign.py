"""One app can neither read nor name another's contexts, nor tell them from missing ones."""

import random

import pytest

from jaxllm.errors import ContextGone
from jaxllm.serving.contexts.catalog import Catalog
from jaxllm.serving.contexts.store import ContextStore
from tests.serving.contexts.test_store import ORIGIN, grown


def test_a_foreign_context_is_looked_up_as_a_missing_one(tmp_path, monkeypatch):
    """The same message, and the same work, which therefore takes the same time."""
    work = []
    for name in ("_find", "find_again", "settle"):
        real = getattr(Catalog, name)
        monkeypatch.setattr(
            Catalog, name, lambda self, *a, _real=real, _name=name: work.append(_name) or _real(self, *a)
        )
    with ContextStore(tmp_path / "store") as store:
        names = [store.commit(*grown(store.create("mail", ORIGIN), [8, 4])).name for _ in range(3)]
        store.create("calendar", ORIGIN)
        draw, told = random.Random(1), set()
        for attempt in range(200):
            foreign = names[attempt % 3] if attempt % 2 else f"{draw.getrandbits(64):016x}"
            work.clear()
            with pytest.raises(ContextGone) as caught:
                store.record(foreign, "calendar")
            told.add((str(caught.value).replace(foreign, "NAME"), tuple(work)))
        assert len(told) == 1
        assert {each.app for each in store.records("calendar")} == {"calendar"}
        assert {store.record(name, "mail").name for name in names} == set(names)
