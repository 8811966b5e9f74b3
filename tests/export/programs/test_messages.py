"""A runtime's own messages are kept from standard error, nobody else's are lost."""

import os
import threading

import pytest

from jaxllm.export.programs.litert import captured_messages

OWN = b"""INFO: [accelerator_registry.cc:43] DestroyAccelerator
INFO: Created TensorFlow Lite XNNPACK delegate for CPU.
I0000 00:00:1795368174.097093   24790 port.cc:153] oneDNN custom operations are on.
"""


def test_others_are_heard_when_the_block_ends(capfd):
    with captured_messages() as said:
        os.write(2, OWN)
        os.write(2, b"warning: another thread\n")
        assert capfd.readouterr().err == ""
        assert "DestroyAccelerator" in said()
        assert "another thread" not in said()
        os.write(2, b"and goes on")
    assert capfd.readouterr().err == "warning: another thread\nand goes on"


def test_an_error_gives_standard_error_back(capfd):
    def fail():
        with captured_messages():
            os.write(2, OWN)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    os.write(2, b"here\n")
    assert capfd.readouterr().err == "here\n"


def test_threads_take_it_one_after_the_other(capfd):
    inside, order = threading.Event(), []

    def second():
        with captured_messages():
            order.append("second")

    with captured_messages(), captured_messages():
        thread = threading.Thread(target=second)
        thread.start()
        inside.wait(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    os.write(2, b"here\n")
    assert capfd.readouterr().err == "here\n"
