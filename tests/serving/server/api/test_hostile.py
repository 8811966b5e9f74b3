"""Random requests get documented statuses and no traceback; the service lives. JAXLLM_FUZZ: how many."""

import json
import os
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.serving.server.api import app as front
from jaxllm.serving.server.api.fields import DIALECTS
from tests.serving.server.api.conftest import FakeBackend, Served
from tests.serving.server.api.scripted import TEMPLATE

STATUSES = {200, 201, 400, 401, 404, 405, 408, 409, 413, 422, 429, 503, 507}
# Stands for a response that is there.
STORED = "resp_stored"
PATHS = [path.replace("{name}", STORED if "responses" in path else "c0") for _, path, *_ in front._ROUTES]
PATHS += ["/", "/v1/%ff", "/v1/contexts/%00"]
OWN = {"content", "tokens", "level", "pinned", "name", "folder", "unknown"}
FIELDS = sorted(OWN.union(*({name.partition(".")[0] for name in each.names} for each in DIALECTS)))
MESSAGES = [{"role": "user", "content": "Hi"}]
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.just(10**30), st.floats(), st.text(max_size=8),
    st.sampled_from(["tiny", "auto", "required", "<40,70>", "json", "function", "\ud800", "user",
                     "thinking", "redacted_thinking", "reasoning", "allowed_tools", "enabled", "high",
                     "message", "function_call", "function_call_output", "input_text", STORED]),
)  # fmt: skip
NAMES = st.sampled_from(
    ["type", "name", "role", "content", "text", "function", "id", "ttft_ms", "tpot_ms", "regex", "call_id",
     "arguments", "output", "format", "schema", "effort", "budget_tokens", "thinking", "signature", "summary",
     "encrypted_content", "mode", "tools", "allowed_tools", "gbnf", "choice", "num_predict", "mirostat"]
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
GOOD = {
    "model": "tiny", "messages": MESSAGES, "max_tokens": 3, "prompt": "a", "input": "Hi",
    "previous_response_id": STORED,
}  # fmt: skip
BODIES = st.one_of(
    st.builds(lambda base, more: json.dumps({k: GOOD[k] for k in base} | more).encode(),
              st.sets(st.sampled_from(sorted(GOOD))), st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3)),  # noqa: E501
    st.binary(max_size=20), VALUES.map(lambda value: json.dumps(value).encode()),
    st.sampled_from([b"[" * 50000, b'{"a":' * 9000, b'{"max_tokens": 1e999}', b'{"n": ' + b"9" * 5000 + b"}"]),  # noqa: E501
)  # fmt: skip


@given(
    st.sampled_from(PATHS), st.sampled_from(["POST", "POST", "POST", "GET", "DELETE", "PUT", "HEAD"]), BODIES
)
@settings(
    max_examples=int(os.environ.get("JAXLLM_FUZZ", "15")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
def test_hostile_requests(served: Served, path: str, method: str, body: bytes) -> None:
    served.backend = FakeBackend(template=TEMPLATE)
    stored = served.post("/v1/responses", {"input": "Hi"}).json()["id"]
    path, body = path.replace(STORED, stored), body.replace(STORED.encode(), stored.encode())
    answer = served.http.request(method, path, content=body)
    told: Any = answer.text
    assert answer.status_code in STATUSES, (answer.status_code, told)
    assert "Traceback" not in told
    assert served.http.get("/health").status_code == 200
