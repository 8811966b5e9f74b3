"""Measures the service under load: apps with objectives that call at their own times, and clients that call
as fast as they are answered, beside ours without batching, planning or reuse of prefixes, and llama.cpp's
server.

`workload` draws what is sent, `load` sends it from a process of its own, `systems` starts the servers,
`run` times the idle whole model and the loads, `outcomes` judges what came back.
"""

from collections.abc import Mapping
from types import MappingProxyType

PARTS: Mapping[str, str] = MappingProxyType(
    {
        "apps": "answers in time of six apps that call at their own times",
        "clients": "tokens per second over clients that call as soon as they are answered",
        "start": "time from the start of the process to the first token",
    }
)
