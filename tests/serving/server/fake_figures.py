"""Events and figures of a service without a model, for metrics."""

from jaxllm.serving.server.calls import Ended, Started

MB = 1 << 20
STARTED = Started(
    prompt_tokens=120, kept_tokens=96, reused_tokens=64, level=70, source="proposed", queued_ms=12.0
)
ENDED = Ended(
    finish_reason="stop", stop_string=None, tokens=21, ttft_ms=200.0, tpot_ms=30.0, engine_ttft_ms=180.0,
    engine_tpot_ms=25.0, met=True, drafted=0.5, seed=1,
)  # fmt: skip
FIGURES = {
    "queue": {"waiting": 2, "limit": 64, "oldest_ms": 84.0},
    "running": {"assistant": {100: 1}, "mail": {70: 2}, "keyboard": {30: 1}},
    "memory": {
        "process_bytes": 1710 * MB, "limit_bytes": 2048 * MB, "pressure": 0.004, "holdings": {
            "weights": {"size_bytes": 912 * MB},
            "kv": {"size_bytes": 118 * MB},
            "contexts": {"size_bytes": 143 * MB, "limit_bytes": 256 * MB, "least_bytes": 16 * MB},
        },
    },
    "contexts": {
        "assistant": {"contexts": 6, "pinned": 1, "stored_bytes": 61 * MB,
                      "chunks": {"raw": 12, "8": 96, "4": 210, "2": 148}},
        "mail": {"contexts": 14, "pinned": 0, "stored_bytes": 88 * MB,
                 "chunks": {"raw": 0, "8": 60, "4": 122, "2": 301}},
    },
    "adapters": {"mail-tone": 6 * MB},
    "experts": {"visits": 120_400, "hits": 109_322, "foreseen": 31_220, "hit_rate": 109_322 / 120_400},
    "read_bytes": {"weights": 0, "experts": 5_400 * MB, "contexts": 310 * MB},
    "grammars": {"compiled": 5, "refused": 1, "ended": 2},
}  # fmt: skip
