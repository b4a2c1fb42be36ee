"""The exponential of vectors, as LLVM assembly.

After the Cephes library's `expf` (Moshier 1989): `exp(x) = 2**n * exp(r)` with `n` the integer next to
`x / ln 2` and a polynomial for `r`, whose relative error is below 2e-7.
"""

from .target import Tile
from .vectors import fma, splat, vector

_LOG2E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_POLYNOMIAL = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
)  # fmt: skip
# Below, 2**n is no normal number; what is so small beside 1 is taken for 0.
_LEAST = -87.0


def source(tile: Tile) -> str:
    """`@exponential(x)`: of a vector of numbers of at most 88; exactly 0 below -87."""
    lanes, floats, whole = tile.lanes, vector(tile), vector(tile, "i32")

    def every(value: int) -> str:
        return f"<{', '.join([f'i32 {value}'] * lanes)}>"

    steps = []
    for place, factor in enumerate(_POLYNOMIAL[1:]):
        steps.append(fma(tile, f"p{place + 1}", f"%p{place}", "%r", splat(tile, factor)))
    last = len(_POLYNOMIAL) - 1
    return "\n".join([
        f"define internal {floats} @exponential({floats} %x) alwaysinline {{",
        f"  %tiny = fcmp olt {floats} %x, {splat(tile, _LEAST)}",
        f"  %held = select <{lanes} x i1> %tiny, {floats} {splat(tile, _LEAST)}, {floats} %x",
        f"  %scaled = fmul {floats} %held, {splat(tile, _LOG2E)}",
        f"  %n = call {floats} @llvm.rint.v{lanes}f32({floats} %scaled)",
        fma(tile, "r.high", "%n", splat(tile, -_LN2_HIGH), "%held"),
        fma(tile, "r", "%n", splat(tile, -_LN2_LOW), "%r.high"),
        f"  %p0 = fadd {floats} {splat(tile, _POLYNOMIAL[0])}, zeroinitializer",
        *steps,
        f"  %square = fmul {floats} %r, %r",
        f"  %one = fadd {floats} %r, {splat(tile, 1.0)}",
        fma(tile, "e", f"%p{last}", "%square", "%one"),
        # What is not a number stays so whatever it is multiplied by, and has no integer.
        f"  %whole.any = fptosi {floats} %n to {whole}",
        f"  %whole = freeze {whole} %whole.any",
        f"  %biased = add {whole} %whole, {every(127)}",
        f"  %bits = shl {whole} %biased, {every(23)}",
        f"  %power = bitcast {whole} %bits to {floats}",
        f"  %made = fmul {floats} %e, %power",
        f"  %given = select <{lanes} x i1> %tiny, {floats} zeroinitializer, {floats} %made",
        f"  ret {floats} %given",
        "}",
    ])  # fmt: skip
