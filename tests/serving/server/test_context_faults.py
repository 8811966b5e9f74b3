"""Contexts whose storage fails for a while: there, gone, or not known; none is forgotten for an error."""

import errno

import pytest

from tests.faults import FailingDevice
from tests.serving.server.talking import FOX, facts, made, said


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOSPC, errno.EIO])
def test_a_context_that_cannot_be_read_for_a_moment_is_not_gone(served, http, error):
    name, other = made(http), made(http)
    before = facts(http, name, FOX, 20)["context_tokens"]
    store = served.service.contexts.store
    store.wait()
    with FailingDevice(store.root, at=None) as device:
        device.fail(error)
        answers = [
            *(said(http, each, [5], 1) for each in (name, other, name, other)),
            http.post(f"/v1/contexts/{other}/pin", json={"pinned": True}),
            http.delete(f"/v1/contexts/{other}"),
        ]
        # One that was never made is gone all the same.
        assert said(http, "0" * 16, [5], 1).status_code == 404
    codes = [(each.status_code, each.json()["error"]["code"]) for each in answers if each.status_code != 200]
    # The catalog is open: some calls need no further file.
    assert len(codes) >= 3
    assert set(codes) <= {(500, "storage_failed"), (503, "storage_failed"), (507, "budget_exceeded")}
    assert all("retry-after" in each.headers for each in answers if each.status_code == 503)
    # An error of writing in the background is told once.
    said(http, name, [5], 1)
    assert facts(http, name, [5], 1)["context_tokens"] >= before
    assert http.get(f"/v1/contexts/{name}").status_code == 200
    served.restart()
    assert facts(http, name, [5], 1)["context_tokens"] >= before
