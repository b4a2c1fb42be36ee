"""servax as a worker of the workload `offline`: the grid of `servax serve minilm`, texts sorted by length."""

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
    with Server(resolve(ModelConfig(model="minilm")).servable) as server:

        def embed() -> tuple[np.ndarray, int]:
            ids = token_ids(texts)
            order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
            answers = server.map([{"ids": ids[i]} for i in order])
            vectors = np.empty((len(ids), answers[0]["embedding"].shape[0]), np.float32)
            vectors[order] = [one["embedding"] for one in answers]
            return vectors, sum(map(len, ids))

        vectors, tokens = embed()
        np.save(vectors_file, vectors)
        print(json.dumps({"ready": True}), flush=True)
        for _ in sys.stdin:
            begin_s = time.perf_counter()
            embed()
            print(json.dumps({"seconds": time.perf_counter() - begin_s, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
