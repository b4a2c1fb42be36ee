"""What CPU libraries take beside the scratch memory that XLA knows of.

XLA:CPU hands clusters of operators to a library that allocates on its own; `Compiled.memory_analysis` does
not see it. The estimate here was compared with the resident memory of single clusters (jax 0.10.2, x86-64):
it is never below what was measured by more than a few percent, and up to three times above it where the
library works in place. Softmax and product in one cluster: 128 of 132 MiB; a 3x3 convolution: 64 of 65 MiB.
"""

import math

from .hlo import Computation, HloModule, Instruction, parse_hlo
from .hlo_cost import FREE

_LIBRARIES = ("ynn", "xnn", "onednn")
_VIEWS = ("broadcast", "reshape", "iota")
_WHOLE = ("dot", "convolution", "reduce", "reduce-window", "transpose", "copy", "concatenate", "pad")


def library_scratch(text: str) -> int:
    """Bytes that the hungriest library cluster of a program may allocate for itself.

    Args:
        text: optimized HLO, as `jax.stages.Compiled.as_text` prints it.

    Returns:
        0 for programs without such clusters, as on other devices than a CPU.
    """
    module = parse_hlo(text)
    found = [0]
    for where in module.computations.values():
        for one in where:
            kind = one.attributes.partition('"fusion_config":{"kind":"')[2].split('"', 1)[0].strip("_")
            if one.opcode == "fusion" and kind.startswith(_LIBRARIES):
                found += [_cluster(inner, module) for inner in module.called(one, where)]
    return max(found)


def _cluster(where: Computation, module: HloModule) -> int:
    """Intermediates that are stored, and operands that a product packs."""
    alone = sum(one.opcode not in FREE for one in where) == 1
    stored, packed = 0, [0]
    for one in where:
        if one.opcode in FREE:
            continue
        if not one.root and one.opcode not in _VIEWS and _stored(one, where):
            stored += one.nbytes
        if one.opcode in ("dot", "convolution"):
            packed.append(_packed(one, where, alone))
    return stored + max(packed)


def _stored(one: Instruction, where: Computation) -> bool:
    """Whether a value meets an operator that needs the whole of it; chains of elementwise ones do not."""
    return one.opcode in _WHOLE or any(user.opcode in _WHOLE for user in where.users[one.name])


def _packed(one: Instruction, where: Computation, alone: bool) -> int:
    operands = [where.instructions[name] for name in one.operands if name in where.instructions]
    if len(operands) < 2 or not operands[1].shapes:
        return 0
    left, right = operands[0], operands[1]
    if one.opcode == "convolution":
        return left.nbytes
    if alone:
        # One matrix of a batch at a time.
        batch = one.numbers("lhs_batch_dims")
        return right.nbytes // max(1, math.prod(right.shapes[0].dims[: len(batch)]))
    return right.nbytes + (left.nbytes if left.opcode != "parameter" else 0)
