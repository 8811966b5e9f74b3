"""One app attacks another's contexts over HTTP: 200 attempts read, name, change and count nothing."""

import json
import secrets

import pytest

from tests.serving.server.context_service import WHOLE
from tests.serving.server.talking import slowly, streamed

SECRET = "the password is swordfish"
# Of an app's contexts none has this name.
NOBODY = "0123456789abcdef"
TRICKS = (
    {}, {"X-App": "mail"}, {"X-Forwarded-User": "mail", "X-Forwarded-For": "127.0.0.1"},
    {"jaxllm.app": "mail"}, {"Cookie": "app=mail"}, {"X-Request-Id": "mail"},
)  # fmt: skip


@pytest.fixture
def apps(context_service):
    mail, spy = context_service.http("mail"), context_service.http("spy")
    yield mail, spy
    for http in (mail, spy):
        for each in http.get("/v1/contexts").json()["data"]:
            assert http.delete(f"/v1/contexts/{each['id']}").status_code == 200


def new(http, **options):
    name = http.post("/v1/contexts", json=options).json()["id"]
    body = {"prompt": SECRET, "max_tokens": 24, **WHOLE}
    assert http.post(f"/v1/contexts/{name}/generate", json=body).status_code == 200
    return name


def attempts(name):
    """Requests that name a context: method, path, body."""
    chat = {"messages": [{"role": "user", "content": "Repeat all."}], "max_tokens": 4}
    text = {"prompt": "Repeat all.", "max_tokens": 4}
    path = f"/v1/contexts/{name}"
    yield "GET", path, None
    yield "GET", path + "?app=mail", None
    yield "DELETE", path, None
    for pinned in (True, False):
        yield "POST", path + "/pin", {"pinned": pinned}
    for body in (chat, text, {"prompt": [1, 2, 3], "max_tokens": 4}, text | {"user": "mail"}):
        for stream in (False, True):
            yield "POST", path + "/generate", body | {"stream": stream}
    for conversation in (name, {"id": name}):
        own = {"conversation": conversation}
        yield "POST", "/v1/chat/completions", chat | own
        yield "POST", "/v1/chat/completions", chat | own | {"stream": True, "prompt_cache_key": "mail"}
        yield "POST", "/v1/completions", text | own
        yield "POST", "/v1/completions", text | own | {"slo": "<40,70>", "strict": True}
        yield "POST", "/v1/messages", chat | own
        yield "POST", "/api/chat", {"messages": chat["messages"], **own}
        yield "POST", "/api/generate", {"prompt": "Repeat all.", "stream": False, **own}


def disguised(name):
    """Other spellings of a name."""
    return (
        name.upper(), name[:15], name + "0", f"mail%2f{name}", f"..%2fapp-mail%2f{name}", f"{name}%00",
        f"{name}%20", "*", "%25", f"app-mail:{name}",
    )  # fmt: skip


def answered(http, method, path, body, headers=None):
    """An answer, without what differs from one request to the next."""
    answer = http.request(method, path, json=body, headers=headers)
    kept = {k: v for k, v in answer.headers.items() if k not in ("x-request-id", "date", "content-length")}
    return answer.status_code, answer.text, kept


def told_apart(http, name, *, tricks=TRICKS):
    """Makes attempts at a context and at one that never was; returns how many, after checking that their
    answers are the same."""
    count = 0
    for number, (mine, other) in enumerate(zip(attempts(name), attempts(NOBODY), strict=True)):
        headers = tricks[number % len(tricks)]
        found, wanted = answered(http, *mine, headers), answered(http, *other, headers)
        assert found[0] in (400, 401, 404), found
        assert (found[0], found[1].replace(name, NOBODY), found[2]) == wanted
        assert "swordfish" not in found[1]
        count += 1
    return count


def test_none_of_200_attempts_tells_of_another_apps_contexts(context_service, apps):
    mail, spy = apps
    names = [new(mail), new(mail, pinned=True)]
    own = new(spy)
    store = context_service.service.contexts.store
    before = [store.record(name) for name in names]
    listed = mail.get("/v1/contexts").json()
    count = 0
    for name in names:
        for trick in range(0, len(TRICKS), 2):
            count += told_apart(spy, name, tricks=TRICKS[trick:] + TRICKS[:trick])
        for spelled, other in zip(disguised(name), disguised(NOBODY), strict=True):
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pin")):
                found = answered(spy, method, f"/v1/contexts/{spelled}{path}", None)
                wanted = answered(spy, method, f"/v1/contexts/{other}{path}", None)
                assert found[0] in (400, 404), found
                assert found[0] == wanted[0]
                count += 1
    for _ in range(30):
        guess = secrets.token_hex(8)
        assert spy.get(f"/v1/contexts/{guess}").status_code == 404
        count += 1
    assert count >= 200
    # Without a key, or with both, nobody is anybody.
    for headers in ({"Authorization": ""}, {"X-API-Key": context_service.keys["mail"]}):
        assert answered(spy, "GET", f"/v1/contexts/{names[0]}", None, headers)[0] == 401
    assert [each["id"] for each in spy.get("/v1/contexts").json()["data"]] == [own]
    assert mail.get("/v1/contexts").json() == listed
    assert [store.record(name) for name in names] == before


def test_nor_does_any_while_the_context_answers(apps, monkeypatch):
    mail, spy = apps
    name = new(mail)
    with slowly(monkeypatch), streamed(mail, name, 60) as lines:
        next(lines)
        # Its own app is told that it is busy, no other.
        assert mail.delete(f"/v1/contexts/{name}").status_code == 409
        for mine, other in [*zip(attempts(name), attempts(NOBODY), strict=True)][:5]:
            found, wanted = answered(spy, *mine), answered(spy, *other)
            assert (found[0], found[1].replace(name, NOBODY), found[2]) == wanted
            assert found[0] == 404
        assert "[DONE]" in "".join(lines)


def test_prompts_of_others_are_never_reused(apps):
    mail, spy = apps
    for number in range(3):
        said = f"{number} {SECRET}"
        body = {"prompt": said, "max_tokens": 4, "prompt_cache_key": "mail", **WHOLE}
        reused = [json.loads(each.post("/v1/completions", json=body).text)["jaxllm"]["reused_tokens"]
                  for each in (mail, spy, mail)]  # fmt: skip
        # The app itself is given its own: the attack would be seen.
        assert reused[1:2] == [0]
        assert reused[2] > 16
