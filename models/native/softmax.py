"""Scores to weights, as LLVM assembly."""

from .exponential import splat
from .target import Tile

_MASKED = -1e30


def source(tile: Tile) -> str:
    """`@softmax(scores, texts, text, from, to, scale)`, which gives the sum of the weights, and `@divide`."""
    return _softmax(tile) + _divide(tile)


def _softmax(tile: Tile) -> str:
    lanes, vector, whole = tile.lanes, f"<{tile.lanes} x float>", f"<{tile.lanes} x i32>"
    return f"""
declare float @llvm.vector.reduce.fmax.v{lanes}f32({vector})
declare float @llvm.vector.reduce.fadd.v{lanes}f32(float, {vector})
declare {vector} @llvm.maxnum.v{lanes}f32({vector}, {vector})
; Scores of one query to weights, whose sum is given: keys of other texts weigh exactly 0.
define internal float @softmax(ptr %scores, ptr %texts, i32 %text, i64 %from, i64 %to, float %scale) {{
entry:
  %t.one = insertelement {whole} poison, i32 %text, i64 0
  %t.all = shufflevector {whole} %t.one, {whole} poison, {whole} zeroinitializer
  %s.one = insertelement {vector} poison, float %scale, i64 0
  %s.all = shufflevector {vector} %s.one, {vector} poison, {whole} zeroinitializer
  br label %look
look:
  %i = phi i64 [%from, %entry], [%i1, %look]
  %highest = phi {vector} [{splat(tile, _MASKED)}, %entry], [%higher, %look]
  %at = getelementptr float, ptr %scores, i64 %i
  %raw = load {vector}, ptr %at, align 4
  %t.at = getelementptr i32, ptr %texts, i64 %i
  %t = load {whole}, ptr %t.at, align 4
  %own = icmp eq {whole} %t, %t.all
  %scaled = fmul {vector} %raw, %s.all
  %score = select <{lanes} x i1> %own, {vector} %scaled, {vector} {splat(tile, _MASKED)}
  store {vector} %score, ptr %at, align 4
  %higher = call {vector} @llvm.maxnum.v{lanes}f32({vector} %highest, {vector} %score)
  %i1 = add i64 %i, {lanes}
  %more = icmp slt i64 %i1, %to
  br i1 %more, label %look, label %found
found:
  %top = call float @llvm.vector.reduce.fmax.v{lanes}f32({vector} %higher)
  %m.one = insertelement {vector} poison, float %top, i64 0
  %m.all = shufflevector {vector} %m.one, {vector} poison, {whole} zeroinitializer
  br label %weigh
weigh:
  %j = phi i64 [%from, %found], [%j1, %weigh]
  %sum = phi {vector} [zeroinitializer, %found], [%sum1, %weigh]
  %w.at = getelementptr float, ptr %scores, i64 %j
  %s = load {vector}, ptr %w.at, align 4
  %below = fsub {vector} %s, %m.all
  %w = call {vector} @exponential({vector} %below)
  store {vector} %w, ptr %w.at, align 4
  %sum1 = fadd {vector} %sum, %w
  %j1 = add i64 %j, {lanes}
  %j.more = icmp slt i64 %j1, %to
  br i1 %j.more, label %weigh, label %end
end:
  %total = call reassoc float @llvm.vector.reduce.fadd.v{lanes}f32(float 0.0, {vector} %sum1)
  ret float %total
}}"""


def _divide(tile: Tile) -> str:
    vector = f"<{tile.lanes} x float>"
    return f"""
define internal void @divide(ptr %x, i64 %size, float %by) {{
entry:
  %part = fdiv float 1.0, %by
  %one = insertelement {vector} poison, float %part, i64 0
  %all = shufflevector {vector} %one, {vector} poison, <{tile.lanes} x i32> zeroinitializer
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i1, %loop]
  %at = getelementptr float, ptr %x, i64 %i
  %v = load {vector}, ptr %at, align 4
  %y = fmul {vector} %v, %all
  store {vector} %y, ptr %at, align 4
  %i1 = add i64 %i, {tile.lanes}
  %more = icmp slt i64 %i1, %size
  br i1 %more, label %loop, label %end
end:
  ret void
}}"""
