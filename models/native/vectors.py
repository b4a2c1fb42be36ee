"""Vectors of a register and what is done with them, as LLVM assembly."""

import struct

from .target import Tile


def vector(tile: Tile, kind: str = "float") -> str:
    """LLVM's name of a register's type."""
    return f"<{tile.lanes} x {kind}>"


def number(value: float) -> str:
    """A float32 as LLVM writes it: the bits of the double of the same value."""
    single = struct.unpack("f", struct.pack("f", value))[0]
    return f"0x{struct.unpack('Q', struct.pack('d', single))[0]:016X}"


def splat(tile: Tile, value: float) -> str:
    """A vector constant of one value."""
    return f"<{', '.join([f'float {number(value)}'] * tile.lanes)}>"


def spread(tile: Tile, name: str, scalar: str, kind: str = "float") -> str:
    """A vector `%NAME` of one number."""
    whole = vector(tile, kind)
    return (
        f"  %{name}.0 = insertelement {whole} poison, {kind} {scalar}, i64 0\n"
        f"  %{name} = shufflevector {whole} %{name}.0, {whole} poison, <{tile.lanes} x i32> zeroinitializer"
    )


def fma(tile: Tile, name: str, a: str, b: str, c: str) -> str:
    """`%NAME`, which is `a` times `b` and `c`, rounded once."""
    floats = vector(tile)
    return f"  %{name} = call {floats} @llvm.fma.v{tile.lanes}f32({floats} {a}, {floats} {b}, {floats} {c})"
