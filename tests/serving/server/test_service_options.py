"""The options of the service, their file, and its sockets: bound once, replaced where they are stale, refused
where others answer on them."""

import dataclasses
import os
import socket
import stat
from pathlib import Path

import pytest

from jaxllm.elastic.slo import Slo
from jaxllm.errors import ConfigError
from jaxllm.serving.elastic.objectives import Binding, Latency
from jaxllm.serving.server.identity import Identity
from jaxllm.serving.server.limits import Limits
from jaxllm.serving.server.scheduler import SchedulerOptions
from jaxllm.serving.server.service_options import ServerOptions, address_of, read_options
from jaxllm.serving.server.sockets import bound, described, passed

FILE = """
model = "bundles/mine.jaxllm"
http = "[::1]:0"
socket = "service.sock"
socket_mode = 0o660
memory = "1.5GB"
context_tokens = 4096
hosts = ["laptop.local"]
origins = ["https://app.example"]
batch_rows = [2, 4]
log_level = "warning"
levels = [50, 100]
prefix_memory = "1MB"
drain_s = 2.5
contexts = "kept"
context_budget = "1MB"
context_keys = "~/keys"
follow_pressure = true
share_across_apps = true
attend_quantized_kv = true

adapters = "adapters"
adapter_rank = 8
adapter_targets = ["attn.q"]
adapter_memory = "1MB"
adapter_count = 3

[adapter]
formal = "adapters/formal"

[objectives]
mail = "<40,70>"
keyboard = { ttft_ms = 200, tpot_ms = 50, strict = true }

[apps]
"uid:1000" = "mail"

[scheduler]
queued = 5
app_queued = 2

[limits]
tokens_per_minute = 1000

[limits.apps.mail]
in_flight = 3
stored_bytes = "1MB"
"""


def read(folder: Path, text: str) -> ServerOptions:
    path = folder / "service.toml"
    path.write_text(text)
    return read_options(path)


def test_a_file_has_all_options(tmp_path):
    options = read(tmp_path, FILE)
    chat = dataclasses.replace(Limits().default, tokens_per_minute=1000)
    mail = dataclasses.replace(chat, in_flight=3, stored_bytes=1_000_000)
    # What the file does not name keeps its default.
    assert options == ServerOptions(
        model=str(tmp_path / "bundles/mine.jaxllm"), http="[::1]:0", socket=tmp_path / "service.sock",
        socket_mode=0o660, memory=1_500_000_000, context_tokens=4096, hosts=("laptop.local",),
        origins=("https://app.example",), batch_rows=(2, 4), log_level="warning", levels=(50, 100),
        prefix_memory=1_000_000, drain_s=2.5, contexts=tmp_path / "kept", context_budget=1_000_000,
        context_keys=Path("~/keys").expanduser(), follow_pressure=True, share_across_apps=True,
        attend_quantized_kv=True, adapters=tmp_path / "adapters", adapter_rank=8, adapter_targets=("attn.q",),
        adapter_memory=1_000_000, adapter_count=3, adapter={"formal": tmp_path / "adapters/formal"},
        objectives={
            "mail": Binding(Slo(ttft=0.4, tpot=0.7)),
            "keyboard": Binding(Latency(ttft_ms=200, tpot_ms=50), strict=True),
        },
        apps={"uid:1000": "mail"}, scheduler=SchedulerOptions(queued=5, app_queued=2),
        limits=Limits(default=chat, apps={"mail": mail}),
    )  # fmt: skip
    assert options.address == ("::1", 0)
    assert {"laptop.local", "127.0.0.1", "[::1]"} <= set(options.guard().hosts)
    contexts = options.context_options()
    assert (contexts.folder, contexts.budget_bytes) == (tmp_path / "kept", 1_000_000)
    assert (contexts.share_across_apps, contexts.encryption) == (True, Path("~/keys").expanduser())


def test_options_of_contexts_need_a_folder_and_have_the_loosest_limits(tmp_path):
    assert ServerOptions().context_options() is None
    for limits, loosest in (("", (256, 4 << 30)), ("contexts = 0\nstored_bytes = 0", (0, 0))):
        options = read(tmp_path, f"contexts = 'kept'\n[limits.apps.mail]\n{limits}").context_options()
        assert (options.contexts_per_app, options.app_quota_bytes) == loosest
        assert (options.encryption, options.budget_bytes) == (None, 256 << 20)
    for name in ("context_budget", "share_across_apps", "attend_quantized_kv", "context_keys"):
        value = {"context_keys": tmp_path, "context_budget": 1}.get(name, True)
        with pytest.raises(ConfigError, match=f"{name} needs a folder"):
            ServerOptions(**{name: value}).context_options()


def test_an_empty_file_has_the_defaults_and_addresses(tmp_path):
    assert read(tmp_path, "") == ServerOptions()
    assert ServerOptions().address == ("127.0.0.1", 8080)
    assert ServerOptions(socket=Path("s")).address is None
    assert ServerOptions(socket=Path("s"), http="Localhost:1").address == ("localhost", 1)
    assert address_of("[fe80::1]:80") == ("fe80::1", 80)
    for wrong in ("8080", ":80", "::1:80", "a:65536", "a:-1", "a:", "a:8o", "a:٣"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            address_of(wrong)


WRONG = [
    ("modle = 'x'", "no option 'modle'; there are model, alias, http"), ("model = 3", "model must be text"),
    ("http = '1'", "HOST:PORT"), ("socket = 1", "socket must be a path"),
    ("socket_mode = 0o1000", "socket_mode"), ("memory = 'much'", "no size"),
    ("memory = -1", "memory must be a whole number"), ("drain_s = nan", "drain_s"),
    ("batch_rows = [3]", "batch_rows"), ("levels = [100, 50]", "levels"), ("levels = 50", "levels"),
    ("hosts = ['A']", "a host is"), ("hosts = ['localhost:80']", "a host is"),
    ("origins = ['*']", "an origin is"), ("origins = ['null']", "an origin is"),
    ("[apps]\nx = 'mail'", "a rule for apps"), ("scheduler = 1", "must be a section"),
    ("[scheduler]\nqueue = 1", "there is no key of \\[scheduler\\] 'queue'; there are queued"),
    ("[scheduler]\nqueued = 0", "queued"), ("[limits]\nflight = 1", "no limit 'flight'; there are in_flight"),
    ("[limits]\npinned = -1", "pinned"), ("[limits.apps]\nmail = 1", "limits.apps.mail must be a section"),
    ("[limits.apps.'a b']\nqueued = 1", "app's name"), ("[adapter]\n'a b' = 'x'", "an adapter's name"),
    ("[adapter]\na = 1", "the folder of the adapter 'a' must be a path"),
    ("adapter_rank = -1", "adapter_rank"), ("adapter_targets = ['x']", "must be among attn.q"),
    ("[objectives]\nmail = { slo = '<40,70>', strict = 1 }", "'mail': strict must be"),
    ("[objectives]\n'a b' = '<40,70>'", "app's name"), ("a = [", "is not TOML"),
    ("a = " + 9999 * "[", "is not TOML"),
]  # fmt: skip


def test_what_is_wrong_is_told_with_the_file(tmp_path):
    for text, message in WRONG:
        with pytest.raises(ConfigError, match=message) as caught:
            read(tmp_path, text)
        assert str(tmp_path / "service.toml") in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_options(tmp_path / "missing.toml")


def listen(**options):
    made = ServerOptions(**options)
    return bound(made.address, made.socket, made.socket_mode, Identity().require_address)


def test_a_port_and_a_path(tmp_path):
    path = tmp_path / "s"
    with listen(http="127.0.0.1:0", socket=path, socket_mode=0o620) as sockets:
        host, port = sockets[0].getsockname()
        assert [described(each) for each in sockets] == [f"http://{host}:{port}", f"unix:{path}"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o620
        for again in ({"http": f"{host}:{port}"}, {"socket": path}):
            with pytest.raises(ConfigError, match="another service listens"), listen(**again):
                pass
        # The refused one took nothing away.
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
        stale.listen()
        with pytest.raises(ConfigError, match="another service"), listen(socket=path):
            pass
    with listen(socket=path) as sockets:
        assert len(sockets) == 1
    path.write_text("mine")
    with pytest.raises(ConfigError, match="not a socket of this user"), listen(socket=path):
        pass
    assert path.read_text() == "mine"


def test_what_cannot_be_bound(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options, message in (
        ({"http": "0.0.0.0:0"}, "not a loopback address"),
        ({"http": "no.such.host.invalid:0"}, "cannot be listened on"),
        ({"socket": Path("/no/such/folder/s")}, "no socket can be made"),
        ({"socket": Path("x" * 200)}, "the socket cannot be made"),
    ):
        with pytest.raises(ConfigError, match=message), listen(**options):
            pass


def test_sockets_for_another_process_are_left_alone():
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x"}
    assert passed(environment) == []
    assert environment == {}
    with pytest.raises(ConfigError, match="LISTEN_FDS"):
        passed({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "none"})
