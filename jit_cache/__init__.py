"""Programs: what a servable is, ahead-of-time compiled executables, the cache, warm-up and the seal."""

from .cache import ProgramCache
from .compiler import CompileService
from .errors import (
    CompileError,
    InputError,
    ItemTooLarge,
    JitCacheError,
    NonFinite,
    OutputError,
    SealedError,
    SignatureError,
    WarmupError,
)
from .monitor import BACKGROUND, OTHER, REQUEST, WARMUP, CompileLog, compile_log
from .outputs import Output, Outputs, infer_outputs
from .program import Program, ProgramFacts, compile_program
from .seal import explain_sealed, open_seal, process_sealed, seal_process, unseal_process
from .servable import Servable, from_nnx
from .signature import Input, Made, Signature, check_item
from .staging import Staging
from .warmup import WarmBucket, WarmupReport, WarmupStep, warm_up, warmup_order

__all__ = [
    "BACKGROUND",
    "OTHER",
    "REQUEST",
    "WARMUP",
    "CompileError",
    "CompileLog",
    "CompileService",
    "Input",
    "InputError",
    "ItemTooLarge",
    "JitCacheError",
    "Made",
    "NonFinite",
    "Output",
    "OutputError",
    "Outputs",
    "Program",
    "ProgramCache",
    "ProgramFacts",
    "SealedError",
    "Servable",
    "Signature",
    "SignatureError",
    "Staging",
    "WarmBucket",
    "WarmupError",
    "WarmupReport",
    "WarmupStep",
    "check_item",
    "compile_log",
    "compile_program",
    "explain_sealed",
    "from_nnx",
    "infer_outputs",
    "open_seal",
    "process_sealed",
    "seal_process",
    "unseal_process",
    "warm_up",
    "warmup_order",
]
