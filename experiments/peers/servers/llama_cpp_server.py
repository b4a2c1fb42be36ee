# mypy: ignore-errors
"""llama.cpp's own HTTP server (continuous batching, OpenAI routes), from a prebuilt wheel."""

import os
import sys
import time

import xllamacpp

if __name__ == "__main__":
    model, slots = sys.argv[1], int(sys.argv[2])
    threads = int(os.environ.get("PEER_THREADS", "2"))
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = int(os.environ["PEER_PORT"])
    params.n_parallel = slots
    params.n_ctx = 1024 * slots
    params.kv_unified = False
    params.cont_batching = True
    params.cache_prompt = False
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    while True:
        time.sleep(3600)
