"""Weights of scores, and what is summed with them, as LLVM assembly."""

from .target import Tile
from .vectors import spread, vector


def source(tile: Tile) -> str:
    """`@weigh`, `@times` of a vector by a number, `@exp1` and `@higher`; they need `@exponential`."""
    lanes, floats = tile.lanes, vector(tile)
    return f"""
; Scores to weights against the highest, whose sum is given.
define internal float @weigh(ptr %scores, i64 %from, i64 %to, float %top) {{
entry:
{spread(tile, "all", "%top")}
  br label %loop
loop:
  %i = phi i64 [%from, %entry], [%i1, %loop]
  %sum = phi {floats} [zeroinitializer, %entry], [%sum1, %loop]
  %at = getelementptr float, ptr %scores, i64 %i
  %score = load {floats}, ptr %at, align 4
  %below = fsub {floats} %score, %all
  %weight = call {floats} @exponential({floats} %below)
  store {floats} %weight, ptr %at, align 4
  %sum1 = fadd {floats} %sum, %weight
  %i1 = add i64 %i, {lanes}
  %more = icmp slt i64 %i1, %to
  br i1 %more, label %loop, label %end
end:
  %total = call reassoc float @llvm.vector.reduce.fadd.v{lanes}f32(float -0.0, {floats} %sum1)
  ret float %total
}}
define internal void @times(ptr %x, i64 %size, float %by) {{
entry:
{spread(tile, "all", "%by")}
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i1, %loop]
  %at = getelementptr float, ptr %x, i64 %i
  %v = load {floats}, ptr %at, align 4
  %y = fmul {floats} %v, %all
  store {floats} %y, ptr %at, align 4
  %i1 = add i64 %i, {lanes}
  %more = icmp slt i64 %i1, %size
  br i1 %more, label %loop, label %end
end:
  ret void
}}
define internal float @exp1(float %x) alwaysinline {{
{spread(tile, "v", "%x")}
  %e = call {floats} @exponential({floats} %v)
  %y = extractelement {floats} %e, i64 0
  ret float %y
}}
define internal float @higher(float %a, float %b) alwaysinline {{
  %more = fcmp ogt float %a, %b
  %y = select i1 %more, float %a, float %b
  ret float %y
}}"""
