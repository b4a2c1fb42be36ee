"""Programs: what a servable is, ahead-of-time compiled executables, the cache, warm-up and the seal."""

from .bucketed import Bucketed, bucketed
from .cache import ProgramCache
from .check import check_item
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
    StoreError,
    WarmupError,
)
from .following import follow
from .hosts import Hosts
from .infer import infer_outputs
from .monitor import BACKGROUND, OTHER, REQUEST, WARMUP, CompileLog, compile_log
from .nnx import from_nnx
from .outputs import Output, Outputs
from .packed import PackedServable
from .placement import Placement
from .program import Program, ProgramFacts, compile_program
from .seal import explain_sealed, open_seal, process_sealed, seal_process, unseal_process
from .servable import Servable
from .signature import Input, Made, Signature
from .staging import Staging
from .stored import StoredPrograms
from .warmup import WarmBucket, WarmupReport, WarmupStep, warm_up, warmup_order

__all__ = [
    "BACKGROUND",
    "OTHER",
    "REQUEST",
    "WARMUP",
    "Bucketed",
    "CompileError",
    "CompileLog",
    "CompileService",
    "Hosts",
    "Input",
    "InputError",
    "ItemTooLarge",
    "JitCacheError",
    "Made",
    "NonFinite",
    "Output",
    "OutputError",
    "Outputs",
    "PackedServable",
    "Placement",
    "Program",
    "ProgramCache",
    "ProgramFacts",
    "SealedError",
    "Servable",
    "Signature",
    "SignatureError",
    "Staging",
    "StoreError",
    "StoredPrograms",
    "WarmBucket",
    "WarmupError",
    "WarmupReport",
    "WarmupStep",
    "bucketed",
    "check_item",
    "compile_log",
    "compile_program",
    "explain_sealed",
    "follow",
    "from_nnx",
    "infer_outputs",
    "open_seal",
    "process_sealed",
    "seal_process",
    "unseal_process",
    "warm_up",
    "warmup_order",
]
