"""`jaxllm serve`: what keeps it from starting. `jaxllm keys`: keys are printed once, listed, and removed."""

import importlib.util

from jaxllm.serving.server.identity import KeyFile
from tests.cli.outcome import answer, failed, succeeded


def test_a_missing_package_is_named(run, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "uvloop" else found(name, *more)
    )
    failed(run("serve"), "uvloop", "pip install 'jaxllm[serve]'")


def test_wrong_options_end_it(run):
    for line, message in (
        ("--http 8080", "HOST:PORT"), ("--draft level:x", "level"), ("--config missing.toml", "missing.toml"),
        ("--adapter a/b=x", "an adapter's name"), ("--alias a/b", "an alias's name"),
        ("--api-key short", "8 to 256"), ("--open --socket s", "give --http, too"),
    ):  # fmt: skip
        failed(run("serve", *line.split()), message)
    for given in (("formal",), ("a=",), ("a=x", "a=y")):
        got = run("serve", *(word for each in given for word in ("--adapter", each)))
        assert (got.code, "write NAME=DIR, each name once" in got.err) == (2, True)


def test_the_command_line_goes_before_the_file(run, tmp_path, monkeypatch):
    path, seen = tmp_path / "service.toml", []
    path.write_text('http = "127.0.0.1:1"\ndrain_s = 3')
    monkeypatch.setattr(
        "jaxllm.serving.server.daemon.run", lambda options, opener, config: seen.append(options)
    )
    monkeypatch.setenv("JAXLLM_API_KEY", "of-the-environment")
    own = ("--alias", "mine", "--context", 512, "--localhost-pages", "--open")
    succeeded(run("serve", "--config", path, "--http", "127.0.0.1:2", *own))
    (got,) = seen
    assert (got.http, got.drain_s, got.model_name) == ("127.0.0.1:2", 3, "mine")
    assert (got.context_tokens, got.api_key, got.open_browser) == (512, "of-the-environment", True)
    assert got.guard().localhost_pages


def test_keys_are_made_listed_and_removed(run, tmp_path):
    path = tmp_path / "config" / "keys.json"
    made = answer(run("keys", "add", "mail", "--file", path, "--json"))
    assert KeyFile(path).find(made["key"]).app == "mail"
    key = succeeded(run("keys", "add", "calendar", "--operator", "--file", path)).strip()
    assert KeyFile(path).find(key).app == "calendar"
    listed = succeeded(run("keys", "list", "--file", path))
    assert f"{made['id']}  mail  made " in listed
    assert "2 keys" in listed
    assert ", operator" in listed
    assert key not in listed
    rows = answer(run("keys", "list", "--file", path, "--json"))["keys"]
    assert [(each["app"], each["operator"]) for each in rows] == [("mail", False), ("calendar", True)]
    removed = answer(run("keys", "remove", made["id"], "--file", path, "--json"))
    assert removed == {"removed": [made["id"]], "left": 1}
    assert "1 removed, 0 left" in succeeded(run("keys", "remove", "calendar", "--file", path))
    failed(run("keys", "remove", "calendar", "--file", path), "no key 'calendar'")
    failed(run("keys", "add", "a b", "--file", path), "an app's name has")
