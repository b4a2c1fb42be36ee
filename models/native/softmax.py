"""Scores of a row's keys to weights, as LLVM assembly."""

from .target import Tile
from .vectors import splat, spread, vector

# Below all scores, minus infinity too: then all of a text are, and it has no weights but NaN.
_MASKED = float("-inf")


def source(tile: Tile) -> str:
    """`@softmax(scores, texts, text, from, to, scale)`, which gives the sum of weights; it needs `@weigh`."""
    lanes, floats, whole = tile.lanes, vector(tile), vector(tile, "i32")
    return f"""
; Scores of one query to weights, whose sum is given: keys of other texts weigh exactly 0.
define internal float @softmax(ptr %scores, ptr %texts, i32 %text, i64 %from, i64 %to, float %scale) {{
entry:
{spread(tile, "t.all", "%text", "i32")}
{spread(tile, "s.all", "%scale")}
  br label %look
look:
  %i = phi i64 [%from, %entry], [%i1, %look]
  %highest = phi {floats} [{splat(tile, _MASKED)}, %entry], [%higher, %look]
  %at = getelementptr float, ptr %scores, i64 %i
  %raw = load {floats}, ptr %at, align 4
  %t.at = getelementptr i32, ptr %texts, i64 %i
  %t = load {whole}, ptr %t.at, align 4
  %own = icmp eq {whole} %t, %t.all
  %scaled = fmul {floats} %raw, %s.all
  %score = select <{lanes} x i1> %own, {floats} %scaled, {floats} {splat(tile, _MASKED)}
  store {floats} %score, ptr %at, align 4
  %above = fcmp ogt {floats} %score, %highest
  %higher = select <{lanes} x i1> %above, {floats} %score, {floats} %highest
  %i1 = add i64 %i, {lanes}
  %more = icmp slt i64 %i1, %to
  br i1 %more, label %look, label %found
found:
  ; Comparing has left out what is no number.
  %top = call nnan float @llvm.vector.reduce.fmax.v{lanes}f32({floats} %higher)
  %total = call float @weigh(ptr %scores, i64 %from, i64 %to, float %top)
  ret float %total
}}"""
