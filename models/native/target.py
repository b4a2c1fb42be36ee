"""How large a tile of the product this machine's registers hold."""

import functools
import platform
import sys
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import KernelUnavailable
from . import cores


class Tile(NamedTuple):
    """The part of a product that is summed in registers.

    Attributes:
        lanes: float32 in a vector register.
        vectors: vectors of one row of the tile.
        rows: of the tile; `rows * vectors` sums, `vectors` weights and one activation are in registers.
        pause: the LLVM instruction for a thread that waits in a loop, with its declaration.
        pairs: whether there is an instruction for products of bfloat16 in pairs.
        fours: whether there is one for products of four uint8 with four int8.
        told: whether a thread can tell its core and leave it.
    """

    lanes: int
    vectors: int
    rows: int
    pause: tuple[str, str]
    pairs: bool = False
    fours: bool = False
    told: bool = False

    @property
    def width(self) -> int:
        """Columns of a tile, and so of a panel."""
        return self.lanes * self.vectors


_X86_PAUSE = ("call void @llvm.x86.sse2.pause()", "declare void @llvm.x86.sse2.pause()")
_ARM_PAUSE = ("call void @llvm.aarch64.hint(i32 1)", "declare void @llvm.aarch64.hint(i32)")


@functools.cache
def tile() -> Tile:
    """For the processor of this machine.

    Raises:
        KernelUnavailable: llvmlite is not installed, or processor or system are of another kind.
    """
    try:
        import llvmlite.binding as llvm
    except ImportError as error:
        raise KernelUnavailable(
            f"products in panels need llvmlite, got {error}: pip install llvmlite"
        ) from error
    return fitting(llvm.get_host_cpu_features(), platform.machine().lower(), sys.platform)


def fitting(features: Mapping[str, bool], machine: str, system: str) -> Tile:
    """For some processor.

    Of 32 registers 24 hold sums, of 16 twelve; on AVX-512 tiles of 8x48 run at 500 GFLOP/s on two cores, and
    at 950 in pairs of bfloat16, as those of 6x64 and 12x32 do. On AVX2 tiles of 4x24 are 1.03 to 1.24 times
    as fast as those of 6x16.

    Args:
        features: that it has, by LLVM's names.
        machine: its kind, as the system names it.
        system: as `sys.platform` names it.

    Raises:
        KernelUnavailable: processor or system are of another kind.
    """
    if system not in ("linux", "darwin") or sys.maxsize < 2**32:
        raise KernelUnavailable(
            f"products in panels are for 64-bit Linux and macOS, got {system}: leave them"
        )
    told = cores.known(system)
    if features.get("avx512f"):
        pairs, fours = (bool(features.get(name)) for name in ("avx512bf16", "avx512vnni"))
        return Tile(16, 3, 8, _X86_PAUSE, pairs, fours, told)
    # Without F16C float16 is widened by a function of compilers' own libraries, which no process here has,
    # and LLVM ends a process that lacks one.
    if all(features.get(name) for name in ("avx2", "fma", "f16c")):
        return Tile(8, 3, 4, _X86_PAUSE, told=told)
    if machine in ("arm64", "aarch64"):
        return Tile(4, 3, 8, _ARM_PAUSE, told=told)
    raise KernelUnavailable(
        f"products in panels need AVX2 with FMA and F16C, AVX-512 or 64-bit ARM, got {machine}: servax does "
        "without"
    )
