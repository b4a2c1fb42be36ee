"""What four bytes of a panel are, and how they are multiplied by four of the activations.

Sums of float32 and bfloat16 are float32. Numbers in bfloat16 stand in pairs of two features, and activations
are rounded to pairs as well: processors with AVX512_BF16 multiply and add a pair at a time, others widen both
to float32 in registers, which is a shift. Both sum the same products, and differ as sums in another order do.

Numbers in int8 stand in fours, activations as uint8 too, and their sums are integers, whose order tells
nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

from .target import Tile

# A name to the lines that take its four bytes a lane apart, and the names of the parts.
_Parts = Callable[[Tile, str], tuple[list[str], list[str]]]


class Element(NamedTuple):
    """A kind of number.

    Attributes:
        target: what XLA knows the kernel by, without the width of its panels. It is in each program that
            calls the kernel, so another kernel needs another one.
        parts: takes a vector apart into operands of `multiply`.
        quarters: of the rows of the machine's tile that leave registers for the parts.
        multiply: the LLVM call `(sum, part, part)` with all its types, of names without `%`.
        declared: the function it calls.
        total: LLVM's name of what a sum is, of four bytes.
        scaled: whether sums become what `scaled` says; else they are the numbers of the product.
    """

    target: str
    quarters: int
    parts: _Parts
    multiply: Callable[[Tile, str, str, str], str]
    declared: Callable[[Tile], str]
    total: str = "float"
    scaled: bool = False

    def called(self, tile: Tile) -> str:
        """What XLA knows the kernel by: panels of another width are no operands for it."""
        return f"{self.target}_{tile.width}"

    def fitted(self, tile: Tile) -> Tile:
        """The tile for such numbers, of the same width."""
        return tile._replace(rows=tile.rows * self.quarters // 4)


def _whole(_: Tile, name: str) -> tuple[list[str], list[str]]:
    return [], [name]


def _as_pairs(tile: Tile, name: str) -> tuple[list[str], list[str]]:
    kinds = f"<{tile.lanes} x float> %{name} to <{2 * tile.lanes} x bfloat>"
    return [f"  %{name}.pair = bitcast {kinds}"], [f"{name}.pair"]


def _widened(tile: Tile, name: str) -> tuple[list[str], list[str]]:
    """The first of a pair is in the lower half; a bfloat16 is the upper half of a float32."""
    whole, bits = f"<{tile.lanes} x float>", f"<{tile.lanes} x i32>"
    lines = [
        f"  %{name}.bits = bitcast {whole} %{name} to {bits}",
        f"  %{name}.low = shl {bits} %{name}.bits, splat (i32 16)",
        f"  %{name}.high = and {bits} %{name}.bits, splat (i32 -65536)",
        f"  %{name}.first = bitcast {bits} %{name}.low to {whole}",
        f"  %{name}.second = bitcast {bits} %{name}.high to {whole}",
    ]
    return lines, [f"{name}.first", f"{name}.second"]


def _fma(tile: Tile, total: str, x: str, w: str) -> str:
    kind = f"<{tile.lanes} x float>"
    return f"call {kind} @llvm.fma.v{tile.lanes}f32({kind} %{x}, {kind} %{w}, {kind} %{total})"


def _fma_declared(tile: Tile) -> str:
    kind = f"<{tile.lanes} x float>"
    return f"declare {kind} @llvm.fma.v{tile.lanes}f32({kind}, {kind}, {kind})"


_PAIRS_OF_512 = "@llvm.x86.avx512bf16.dpbf16ps.512"


def _dot(_: Tile, total: str, x: str, w: str) -> str:
    pairs = "<32 x bfloat>"
    return f"call <16 x float> {_PAIRS_OF_512}(<16 x float> %{total}, {pairs} %{x}, {pairs} %{w})"


def _dot_declared(_: Tile) -> str:
    return f"declare <16 x float> {_PAIRS_OF_512}(<16 x float>, <32 x bfloat>, <32 x bfloat>)"


# Activations are what is unsigned of the two.
_FOURS_OF_512 = "@llvm.x86.avx512.vpdpbusd.512"


def _fours(_: Tile, total: str, x: str, w: str) -> str:
    return f"call <16 x i32> {_FOURS_OF_512}(<16 x i32> %{total}, <16 x i32> %{x}, <16 x i32> %{w})"


def _fours_declared(_: Tile) -> str:
    return f"declare <16 x i32> {_FOURS_OF_512}(<16 x i32>, <16 x i32>, <16 x i32>)"


FLOAT32 = Element("servax_panels_matmul_float32_v2", 4, _whole, _fma, _fma_declared)
PAIRS = Element("servax_panels_matmul_bfloat16_v2", 4, _as_pairs, _dot, _dot_declared)
WIDENED = Element("servax_panels_matmul_bfloat16_widened_v2", 3, _widened, _fma, _fma_declared)
FOURS = Element("servax_panels_matmul_int8_v2", 4, _whole, _fours, _fours_declared, "i32", scaled=True)


def brief(tile: Tile) -> Element:
    """How this machine multiplies bfloat16."""
    return PAIRS if tile.pairs else WIDENED
