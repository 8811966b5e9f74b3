"""Starts a service on two processors twice, as two processes would; prints what was measured and compiled."""

import json
import sys

from serving.prefill.processors import prepare_processors

prepare_processors()

from serving.engine import Engine  # noqa: E402
from serving.options import EngineOptions  # noqa: E402
from serving.prefill import table as tables  # noqa: E402
from serving.prefill.options import PrefillOptions  # noqa: E402
from serving.prefill.table import IntegerTable  # noqa: E402


def main(path: str) -> None:
    """Each start warms up for one request; the graphs and times of the first are on disk for the second."""
    runs = []
    real = tables.measured_times

    def counted(*args, **kwargs):
        runs.append(1)
        return real(*args, **kwargs)

    tables.measured_times = counted
    found = []
    for _ in range(2):
        options = EngineOptions(
            chunk_tokens=(16,),
            cache_tokens=(64,),
            context_tokens=64,
            executables_bytes=1 << 28,
            prefill=PrefillOptions(processors=2),
        )
        engine = Engine.open(path, options=options, warm_up=False)
        runs.clear()
        engine.warm_up(prompt_tokens=20, max_tokens=1)
        table = engine.table
        assert isinstance(table, IntegerTable)
        integer = [bucket for bucket in table.bucket_ms if bucket.bits and bucket.kind.startswith("int_")]
        passing = table.begin_passing(table.start(20), [0] * 20, 0)
        times = table.times(passing)
        logits, _ = table.prefill(table.start(20), list(range(20)), 0)
        found.append(
            {
                "measured": len(runs),
                "integer": len(integer),
                "loaded": sum(bucket in table.loaded for bucket in integer),
                "times": [times(each) for each in table.subgraphs(passing)],
                "logits": logits[0].tolist(),
            }
        )
        engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
