"""servax as a worker of the workload `offline`: packed as by `servax serve minilm`, texts as they come."""

import json
import sys
import time
from pathlib import Path

import numpy as np

from ..minilm import token_ids


def main(texts_file: str, vectors_file: str) -> None:
    """Embed the file once, then again for each line on stdin; one line of JSON each time."""
    from ...server import Server
    from ...server.cli.wiring import resolve
    from ...server.config import ModelConfig

    texts = json.loads(Path(texts_file).read_text())
    with Server(resolve(ModelConfig(model="minilm", layout="packed")).servable) as server:

        def embed() -> tuple[np.ndarray, int]:
            ids = token_ids(texts)
            answers = server.map([{"ids": one} for one in ids])
            return np.array([one["embedding"] for one in answers], np.float32), sum(map(len, ids))

        vectors, tokens = embed()
        np.save(vectors_file, vectors)
        print(json.dumps({"ready": True}), flush=True)
        for _ in sys.stdin:
            begin_s = time.perf_counter()
            embed()
            print(json.dumps({"seconds": time.perf_counter() - begin_s, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
