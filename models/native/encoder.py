"""Attention of rows of texts to themselves, as LLVM assembly.

Rows are of any length and lie one behind another. A unit is a head of a row. Its keys are laid out as columns
once; then a few queries at a time meet the keys from the first to the last block of them that holds a text of
theirs, so that texts which share a row cost what they would cost alone. Scores, weights and the mix of values
of these queries stay in the cache.
"""

from . import columns, exponential, frame, softmax, texts, tiles, weights
from .crew import Job
from .header import Header
from .target import Tile

_VECTORS = 2  # of keys in a block
_WORTH_A_THREAD = 1 << 16
_JOB = Job(("qkv", "texts", "starts", "c", "tokens", "longest", "heads", "size", "scale"))


def source(header: Header, tile: Tile) -> str:
    """`@attention` is what XLA calls.

    Its operands are float32 `(tokens, 3 * heads * size)`, int32 `(tokens,)`, int32 `(rows + 1,)` and a
    float32 scale, its result is float32 `(tokens, heads, size)`.
    """
    product = tiles.Product(tile, tile.rows, _VECTORS)
    parts = [tiles.source(product), exponential.source(tile), weights.source(tile), softmax.source(tile)]
    parts += [_LENGTH, columns.source(tile, _block(tile)), texts.source(_block(tile)), _queries(tile)]
    return "\n".join([*parts, _unit(tile), _handler(header, tile)])


def _block(tile: Tile) -> int:
    return tile.lanes * _VECTORS


_LENGTH = """
; Tokens of a row: none where its numbers make no sense.
define internal i64 @length(ptr %starts, i64 %row, i64 %tokens) {
  %next = add i64 %row, 1
  %from = call i64 @clipped(ptr %starts, i64 %row, i64 %tokens)
  %to = call i64 @clipped(ptr %starts, i64 %next, i64 %tokens)
  %given = sub i64 %to, %from
  %length = call i64 @llvm.smax.i64(i64 %given, i64 0)
  ret i64 %length
}"""


def _queries(tile: Tile) -> str:
    """A few queries: scores in each block of keys, weights, and the mix of values."""
    block = _block(tile)
    return f"""
define internal void @queries(i64 %rows, ptr %q, ptr %keys, ptr %v, i64 %stride, ptr %c, i64 %ldc,
    ptr %scores, i64 %width, ptr %texts, ptr %own, i64 %from, i64 %to, i64 %length, i64 %size,
    float %scale) {{
entry:
  %whole = mul i64 %size, {block}
  br label %score
score:
  %b = phi i64 [%from, %entry], [%b1, %score]
  %number = udiv i64 %b, {block}
  %skip = mul i64 %number, %whole
  %k = getelementptr float, ptr %keys, i64 %skip
  %s = getelementptr float, ptr %scores, i64 %b
  call void @multiply(i64 %rows, ptr %q, i64 %stride, ptr %k, i64 {block}, ptr %s, i64 %width, i64 %size,
    i64 {block})
  %b1 = add i64 %b, {block}
  %b.more = icmp slt i64 %b1, %to
  br i1 %b.more, label %score, label %weights
weights:
  %totals = alloca [{tile.rows} x float]
  br label %weigh
weigh:
  %r = phi i64 [0, %weights], [%r1, %weigh]
  %line = mul i64 %r, %width
  %w = getelementptr float, ptr %scores, i64 %line
  %text.at = getelementptr i32, ptr %own, i64 %r
  %text = load i32, ptr %text.at
  %total = call float @softmax(ptr %w, ptr %texts, i32 %text, i64 %from, i64 %to, float %scale)
  %total.at = getelementptr float, ptr %totals, i64 %r
  store float %total, ptr %total.at
  %r1 = add i64 %r, 1
  %r.more = icmp slt i64 %r1, %rows
  br i1 %r.more, label %weigh, label %values
values:
  %last = call i64 @llvm.smin.i64(i64 %to, i64 %length)
  %count = sub i64 %last, %from
  %first = mul i64 %from, %stride
  %v.first = getelementptr float, ptr %v, i64 %first
  %w.first = getelementptr float, ptr %scores, i64 %from
  call void @multiply(i64 %rows, ptr %w.first, i64 %width, ptr %v.first, i64 %stride, ptr %c, i64 %ldc,
    i64 %count, i64 %size)
  br label %part
part:
  %p = phi i64 [0, %values], [%p1, %part]
  %p.skip = mul i64 %p, %ldc
  %p.at = getelementptr float, ptr %c, i64 %p.skip
  %by.at = getelementptr float, ptr %totals, i64 %p
  %sum = load float, ptr %by.at
  %by = fdiv float 1.0, %sum
  call void @times(ptr %p.at, i64 %size, float %by)
  %p1 = add i64 %p, 1
  %p.more = icmp slt i64 %p1, %rows
  br i1 %p.more, label %part, label %end
end:
  ret void
}}
"""


def _unit(tile: Tile) -> str:
    block = _block(tile)
    return f"""
define internal void @heads(ptr %job, i64 %unit.from, i64 %unit.to) {{
entry:
{_JOB.loaded(pointers=("qkv", "texts", "starts", "c"))}
  %scale.bits = trunc i64 %scale to i32
  %factor = bitcast i32 %scale.bits to float
  %hidden = mul i64 %heads, %size
  %stride = mul i64 %hidden, 3
  %most.over = add i64 %longest, {block - 1}
  %most.blocks = udiv i64 %most.over, {block}
  %most = mul i64 %most.blocks, {block}
  %keys.count = mul i64 %most, %size
  %scores.count = mul i64 %most, {tile.rows}
  %front = add i64 %keys.count, %scores.count
  %behind = add i64 %front, %most
  %numbers = add i64 %behind, %most
  %bytes = mul i64 %numbers, 4
  %keys = call ptr @malloc(i64 %bytes)
  ; Columns past the last key are multiplied too, and what comes of it is masked: zeros, so that no run
  ; depends on what was in memory.
  call void @llvm.memset.p0.i64(ptr %keys, i8 0, i64 %bytes, i1 false)
  %scores = getelementptr float, ptr %keys, i64 %keys.count
  %held = getelementptr float, ptr %keys, i64 %front
  %reaches = getelementptr float, ptr %keys, i64 %behind
  %from.at = alloca i64
  %to.at = alloca i64
  br label %unit
unit:
  %u = phi i64 [%unit.from, %entry], [%u1, %united]
  %row = udiv i64 %u, %heads
  %head = urem i64 %u, %heads
  %length = call i64 @length(ptr %starts, i64 %row, i64 %tokens)
  %none = icmp eq i64 %length, 0
  br i1 %none, label %united, label %some
some:
  %over = add i64 %length, {block - 1}
  %blocks = udiv i64 %over, {block}
  %padded = mul i64 %blocks, {block}
  %row.tokens = call i64 @clipped(ptr %starts, i64 %row, i64 %tokens)
  %row.skip = mul i64 %row.tokens, %stride
  %head.skip = mul i64 %head, %size
  %skip = add i64 %row.skip, %head.skip
  %q = getelementptr float, ptr %qkv, i64 %skip
  %k = getelementptr float, ptr %q, i64 %hidden
  %v = getelementptr float, ptr %k, i64 %hidden
  %c.row = mul i64 %row.tokens, %hidden
  %c.skip = add i64 %c.row, %head.skip
  %out = getelementptr float, ptr %c, i64 %c.skip
  %own = getelementptr i32, ptr %texts, i64 %row.tokens
  call void @texts(ptr %own, ptr %held, i64 %length, i64 %padded)
  call void @columns(ptr %k, i64 %stride, ptr %keys, i64 %length, i64 %size)
  call void @reaches(ptr %held, i64 %padded, ptr %reaches)
  br label %few
few:
  %i = phi i64 [0, %some], [%i1, %few]
  %left = sub i64 %length, %i
  %rows = call i64 @llvm.smin.i64(i64 %left, i64 {tile.rows})
  %i.own = getelementptr i32, ptr %held, i64 %i
  call void @range(ptr %reaches, ptr %i.own, i64 %rows, i64 %padded, ptr %from.at, ptr %to.at)
  %from = load i64, ptr %from.at
  %to = load i64, ptr %to.at
  %q.skip = mul i64 %i, %stride
  %i.q = getelementptr float, ptr %q, i64 %q.skip
  %o.skip = mul i64 %i, %hidden
  %i.out = getelementptr float, ptr %out, i64 %o.skip
  call void @queries(i64 %rows, ptr %i.q, ptr %keys, ptr %v, i64 %stride, ptr %i.out, i64 %hidden,
    ptr %scores, i64 %padded, ptr %held, ptr %i.own, i64 %from, i64 %to, i64 %length, i64 %size,
    float %factor)
  %i1 = add i64 %i, {tile.rows}
  %i.more = icmp slt i64 %i1, %length
  br i1 %i.more, label %few, label %united
united:
  %u1 = add i64 %u, 1
  %u.more = icmp slt i64 %u1, %unit.to
  br i1 %u.more, label %unit, label %end
end:
  call void @free(ptr %keys)
  ret void
}}"""


def _handler(header: Header, tile: Tile) -> str:
    fields = {name: f"i64 %{name}" for name in ("tokens", "longest", "heads", "size")}
    pointers = {"qkv": "ptr %a.data", "texts": "ptr %t.data", "starts": "ptr %r.data", "c": "ptr %c.data"}
    body = f"""
{frame.size("tokens", "c", 0)}
{frame.size("heads", "c", 1)}
{frame.size("size", "c", 2)}
{frame.size("bounds", "r", 0)}
  %scale.bits = load i32, ptr %s.data
  %scale = zext i32 %scale.bits to i64
  %rows = sub i64 %bounds, 1
  %width = mul i64 %heads, %size
  ; Tokens behind the last row are nobody's.
  %live = call i64 @clipped(ptr %r.data, i64 %rows, i64 %tokens)
  call void @cleared(ptr %c.data, i64 %live, i64 %tokens, i64 %width)
  br label %look
look:
  %row = phi i64 [0, %run], [%row1, %add]
  %longest = phi i64 [0, %run], [%longest1, %add]
  %pairs = phi i64 [0, %run], [%pairs1, %add]
  %row.more = icmp slt i64 %row, %rows
  br i1 %row.more, label %add, label %seen
add:
  %length = call i64 @length(ptr %r.data, i64 %row, i64 %tokens)
  %longest1 = call i64 @llvm.smax.i64(i64 %longest, i64 %length)
  %square = mul i64 %length, %length
  %pairs1 = add i64 %pairs, %square
  %row1 = add i64 %row, 1
  br label %look
seen:
  %units = mul i64 %rows, %heads
  %multiplications = mul i64 %pairs, %width
  %none = icmp eq i64 %multiplications, 0
  br i1 %none, label %empty, label %some
empty:
  ret ptr null
some:
  %worth = sdiv i64 %multiplications, {_WORTH_A_THREAD}
{_JOB.made("%units", "@heads", fields | pointers | {"scale": "i64 %scale"})}
  call void @run(ptr %api, ptr %ctx, ptr %job, i64 %worth)
  ret ptr null"""
    return frame.handler(header, "attention", ("a", "t", "r", "s", "c"), body)
