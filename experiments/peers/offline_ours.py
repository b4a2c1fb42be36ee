"""servax as a worker of the workload `offline`: packed, in the usual buckets."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..minilm import load_minilm


def main(texts_file: str, vectors_file: str) -> None:
    """Embed the file once, then again for each line on stdin; one line of JSON each time."""
    from ...server import Server, tokenized
    from ...server.cli.wiring import resolve
    from ...server.config import ModelConfig

    texts, tokenizer = json.loads(Path(texts_file).read_text()), load_minilm().tokenizer
    config = ModelConfig(model="minilm", layout="packed")
    with Server(resolve(config).servable) as server:

        def embed() -> tuple[np.ndarray, int]:
            counts: list[int] = []

            def items() -> Iterator[dict[str, Any]]:
                for item in tokenized(texts, tokenizer):
                    counts.append(len(item["ids"]))
                    yield item

            answers = server.map(items())
            return np.array([one["embedding"] for one in answers], np.float32), sum(counts)

        vectors, tokens = embed()
        np.save(vectors_file, vectors)
        print(json.dumps({"ready": True}), flush=True)
        for _ in sys.stdin:
            begin_s = time.perf_counter()
            embed()
            print(json.dumps({"seconds": time.perf_counter() - begin_s, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
