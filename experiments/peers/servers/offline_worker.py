# mypy: ignore-errors
"""Embed a file of texts as fast as one can: sorted by length, in batches of 32, once for each line on stdin.

offline_worker.py onnxruntime|openvino|ctranslate2 texts.json vectors.npy
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from encoder import THREADS, Encoder, make_tokenizer, padded

BATCH = 32


def openvino_run():
    """The same ONNX file under OpenVINO, tuned for throughput or latency by its own hint."""
    import openvino

    core = openvino.Core()
    hints = {
        "INFERENCE_NUM_THREADS": THREADS,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    compiled = core.compile_model(os.environ["PEER_ONNX"], "CPU", hints)
    request = compiled.create_infer_request()

    def run(ids, mask):
        request.infer({"input_ids": ids, "attention_mask": mask})
        return request.get_output_tensor(0).data.copy()

    return run


def onnxruntime_run():
    """ONNX Runtime."""
    session = Encoder().session
    return lambda ids, mask: session.run(None, {"input_ids": ids, "attention_mask": mask})[0]


def ctranslate2_run():
    """CTranslate2, from a model folder of its own."""
    from ctranslate2_model import run

    return run()


ENGINES = {"onnxruntime": onnxruntime_run, "openvino": openvino_run, "ctranslate2": ctranslate2_run}


def embed(run, tokenizer, texts):
    """float32 `(texts, width)`, in the order of the texts, and the number of real tokens."""
    encodings = tokenizer.encode_batch(texts)
    order = sorted(range(len(texts)), key=lambda i: len(encodings[i].ids))
    vectors = [None] * len(texts)
    for begin in range(0, len(order), BATCH):
        rows = order[begin : begin + BATCH]
        for row, vector in zip(rows, run(*padded([encodings[i] for i in rows])), strict=True):
            vectors[row] = vector
    return np.stack(vectors), sum(len(one.ids) for one in encodings)


def main(engine, texts_file, vectors_file):
    """Answers each line with one of JSON."""
    run = ENGINES[engine]()
    tokenizer, texts = make_tokenizer(), json.loads(Path(texts_file).read_text())
    vectors, tokens = embed(run, tokenizer, texts)  # warms up every shape of the pass
    np.save(vectors_file, vectors)
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        embed(run, tokenizer, texts)
        print(json.dumps({"seconds": time.perf_counter() - begin, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
