"""Prints the resident bytes before and after a hundred batches in the largest bucket; a process of its own,
so that nothing else counts.

A reading may fall into a moment in which a buffer is not given back yet: the least of a few counts.
"""

import json

import numpy as np
from servax.jit_cache import Servable
from servax.jit_cache.device_memory import resident_bytes
from servax.server import Server
from servax.server.hosting.programs import Programs

VOCABULARY, ROWS = 50_000, 16


def main() -> None:
    servable = Servable(
        lambda w, *, counts: {"scores": counts * w, "total": counts.sum(1)},
        np.ones(VOCABULARY, np.float32),
        inputs={"counts": f"float32[{VOCABULARY}]"},
        limits={"batch": ROWS},
        scheme={"batch": [ROWS]},
        name="bag",
    )
    batch = np.random.default_rng(0).random((ROWS, VOCABULARY), np.float32)
    records = []
    with Server(servable, on_batch=records.append, programs=Programs(memory_bytes=1 << 40)) as server:

        def run(times: int) -> int:
            for _ in range(times):
                server(batch)
            return resident_bytes()

        before = min(run(10) for _ in range(4))
        after = min(run(25) for _ in range(4))
    buckets = sorted({(one.rows, one.bucket.rows) for one in records})
    print(json.dumps({"before": before, "after": after, "buckets": buckets}))


if __name__ == "__main__":
    main()
