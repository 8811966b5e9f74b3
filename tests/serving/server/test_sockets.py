"""Sockets of the service: bound once, replaced where they are stale, refused where others answer on them."""

import os
import socket
import stat
from pathlib import Path

import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.server.daemon import Notifier
from jaxllm.serving.server.identity import Identity
from jaxllm.serving.server.service_options import ServerOptions
from jaxllm.serving.server.sockets import bound, described, passed

IDENTITY = Identity()


def listen(**options):
    return bound(ServerOptions(**options), IDENTITY)


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
    with listen(socket=path):
        assert path.exists()


def test_a_stale_socket_is_replaced_and_nothing_else(tmp_path):
    path = tmp_path / "s"
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


def test_states_are_told_to_systemd(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        name = tmp_path / "notify"
        systemd.bind(str(name))
        environment = {"NOTIFY_SOCKET": str(name), "WATCHDOG_USEC": "2500000"}
        notifier = Notifier(environment)
        assert (environment, notifier.watchdog_s) == ({}, 2.5)
        notifier.send("READY=1", "STATUS=here")
        assert systemd.recv(100) == b"READY=1\nSTATUS=here"
    notifier.send("STOPPING=1")
    assert Notifier({}).watchdog_s is None
    other = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}
    assert Notifier(other).watchdog_s is None
