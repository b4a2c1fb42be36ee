"""Language models: continuous batching over a paged KV pool, in a fixed set of programs."""

from .api import GenerationServer
from .engine import StepRecord
from .errors import GenerationFault, PoolFault, SlotFault, StateFault
from .output import Delta, TokenLogprobs, Usage
from .params import SamplingParams
from .seam import LanguageModel

__all__ = [
    "Delta",
    "GenerationFault",
    "GenerationServer",
    "LanguageModel",
    "PoolFault",
    "SamplingParams",
    "SlotFault",
    "StateFault",
    "StepRecord",
    "TokenLogprobs",
    "Usage",
]
