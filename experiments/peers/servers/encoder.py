# mypy: ignore-errors
"""MiniLM under ONNX Runtime: texts in, vectors out. Runs in a peer's own environment, without servax."""

import os
import threading

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

THREADS = int(os.environ.get("PEER_THREADS", "2"))
MAX_BATCH = int(os.environ.get("PEER_MAX_BATCH", "16"))
MAX_TOKENS = 256


def port():
    """Where to listen."""
    return int(os.environ["PEER_PORT"])


def make_tokenizer():
    """The model's tokenizer, which cuts at the model's limit and does not pad."""
    tokenizer = Tokenizer.from_file(os.environ["PEER_TOKENIZER"])
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.no_padding()
    return tokenizer


def padded(encodings):
    """Ids and mask, int64 `(batch, longest)`."""
    longest = max(len(one.ids) for one in encodings)
    ids = np.zeros((len(encodings), longest), np.int64)
    mask = np.zeros_like(ids)
    for row, one in enumerate(encodings):
        ids[row, : len(one.ids)] = one.ids
        mask[row, : len(one.ids)] = 1
    return ids, mask


class Encoder:
    """One session; calls of several threads run one after another."""

    def __init__(self):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        self.session = onnxruntime.InferenceSession(
            os.environ["PEER_ONNX"], options, providers=["CPUExecutionProvider"]
        )
        self.tokenizer = make_tokenizer()
        self.lock = threading.Lock()

    def __call__(self, texts):
        """float32 `(texts, width)`."""
        ids, mask = padded(self.tokenizer.encode_batch(list(texts)))
        with self.lock:
            return self.session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
