# mypy: ignore-errors
"""The same encoder under Triton's dynamic batcher, through its Python backend."""

import os
import time

import numpy as np
from encoder import MAX_BATCH, Encoder, port
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

encoder = Encoder()


@batch
def infer(text):
    """Vectors of a batch."""
    return {"embedding": encoder([row[0].decode() for row in text])}


if __name__ == "__main__":
    here = "127.0.0.1"
    grpc, metrics = (int(one) for one in os.environ["PEER_MORE_PORTS"].split(","))
    config = TritonConfig(
        http_address=here,
        http_port=port(),
        grpc_address=here,
        grpc_port=grpc,
        metrics_address=here,
        metrics_port=metrics,
    )
    with Triton(config=config) as triton:
        triton.bind(
            "minilm",
            infer,
            inputs=[Tensor(name="text", dtype=bytes, shape=(1,))],
            outputs=[Tensor(name="embedding", dtype=np.float32, shape=(384,))],
            config=ModelConfig(
                max_batch_size=MAX_BATCH, batcher=DynamicBatcher(max_queue_delay_microseconds=5000)
            ),
        )
        triton.run()
        while True:
            time.sleep(3600)
