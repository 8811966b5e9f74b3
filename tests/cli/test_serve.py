"""`jaxllm serve`: what keeps it from starting."""

import importlib.util

import pytest

from jaxllm.cli import serve
from tests.cli.outcome import failed


def test_a_missing_package_is_named(run, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "uvloop" else found(name, *more)
    )
    failed(run("serve"), "uvloop", "pip install 'jaxllm[serve]'")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--http 8080", "HOST:PORT"), ("--http 192.0.2.1:80", "not a loopback address"),
        ("--draft level:x", "level"), ("--config missing.toml", "missing.toml"),
        ("--adapter a/b=x", "an adapter's name"),
    ],
)  # fmt: skip
def test_wrong_options_end_it(run, line, message):
    failed(run("serve", *line.split()), message)


@pytest.mark.parametrize("given", [("formal",), ("=x",), ("a=",), ("a=x", "a=y")])
def test_adapters_have_names_and_folders(run, given):
    for command, flag in (("serve", "--adapter"), ("export model -o out", "--adapter-input")):
        got = run(*command.split(), *(word for each in given for word in (flag, each)))
        assert (got.code, "write NAME=DIR, each name once" in got.err) == (2, True)


def test_the_command_line_goes_before_the_file(tmp_path):
    path = tmp_path / "service.toml"
    path.write_text('http = "127.0.0.1:1"\ndrain_s = 3')
    options = serve._options(path, {"http": "127.0.0.1:2"})
    assert (options.http, options.drain_s) == ("127.0.0.1:2", 3)
