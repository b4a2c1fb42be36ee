"""Attention of a few queries to what a paged pool holds, as LLVM assembly: pages are read where they lie.

The weights of a page are taken against a running maximum, and what is summed before shrinks when it rises
(Milakov & Gimelshein 2018, arXiv:1805.02867). A row's tokens are cut into spans of fixed length, which
threads share, and what these give is joined at the end, in order (Dao et al. 2023, "Flash-Decoding"). A
row's result depends on its own length and pages only, to the bit, and on whether its queries are many.

One call for 8 rows of 128 tokens of SmolLM2 takes 17 us on 2 cores and for 32 rows 81 us from the cache, or
140 us from memory; as loops of XLA's gathers and products it took 52 and 260 us from the cache.
"""

from . import exponential, frame, pool_join, pool_spans, tiles, weights
from .header import Header
from .pool_spans import JOB, PART, POINTERS, SIZES
from .target import Tile

# Tokens of a span: so few that one row with a long context is work for several threads. More queries than a
# unit's are enough of it, and need much memory in spans: they have one.
_SPAN = 256
# What is worth waking a thread for, which takes about 5 us: multiplications of scores, and numbers to join.
_SCORES, _JOINED = 1 << 16, 1 << 14
# Vectors of a row whose sums are in registers for a few queries.
_VECTORS = 4
_OPERANDS = ("q", "k", "v", "table", "lengths", "n", "h", "t", "m", "y")


def source(header: Header, tile: Tile, kind: str) -> str:
    """`@attend` is what XLA calls, with the arguments of `paged_attention.attend` in order.

    Args:
        header: of the interface.
        tile: of this machine, for its `lanes`.
        kind: LLVM's name of the pool's type, `float` or `half`.
    """
    product = tiles.Product(tile, pool_spans.rows(tile), _VECTORS, kind, adds=True)
    parts = [tiles.source(product), exponential.source(tile), weights.source(tile)]
    parts += [pool_spans.source(tile, kind), pool_join.source(tile)]
    return "\n".join([*parts, _handler(header, tile, kind)])


def _handler(header: Header, tile: Tile, kind: str) -> str:
    elsewhere = {"k": "ptr %layer.k", "v": "ptr %layer.v", "records": "ptr %records"}
    pointers = {name: elsewhere.get(name, f"ptr %{name}.data") for name in POINTERS}
    fields = pointers | {name: f"i64 %{name}" for name in SIZES}
    body = f"""
{frame.size("rows", "q", 0)}
{frame.size("kv", "q", 1)}
{frame.size("queries", "q", 2)}
{frame.size("head", "q", 3)}
{frame.size("layers", "v", 0)}
{frame.size("pages", "v", 1)}
{frame.size("size", "v", 3)}
{frame.size("width", "table", 1)}
  %heads = mul i64 %rows, %kv
  %outputs = mul i64 %heads, %queries
  %none = icmp eq i64 %outputs, 0
  br i1 %none, label %empty, label %some
empty:
  ret ptr null
some:
  %box = mul i64 %head, %size
  %page.all = mul i64 %box, %kv
  %layer.all = mul i64 %page.all, %pages
  %final = sub i64 %layers, 1
  %layer = call i64 @clipped(ptr %n.data, i64 0, i64 %final)
  %skip = mul i64 %layer.all, %layer
  %layer.k = getelementptr {kind}, ptr %k.data, i64 %skip
  %layer.v = getelementptr {kind}, ptr %v.data, i64 %skip
  %span.pages = udiv i64 {_SPAN}, %size
  %many = icmp sgt i64 %queries, {PART}
  %span.most = select i1 %many, i64 %width, i64 %span.pages
  %span.some = call i64 @llvm.smax.i64(i64 %span.most, i64 1)
  %span = mul i64 %span.some, %size
  %record = add i64 %head, {tile.lanes}
  br label %row
row:
  %r = phi i64 [0, %some], [%r1, %row]
  %longest = phi i64 [0, %some], [%longest1, %row]
  %tokens = phi i64 [0, %some], [%tokens1, %row]
  %length = call i64 @length(ptr %lengths.data, i64 %r, i64 %width, i64 %size)
  %longest1 = call i64 @llvm.smax.i64(i64 %longest, i64 %length)
  %tokens1 = add i64 %tokens, %length
  %r1 = add i64 %r, 1
  %r.more = icmp slt i64 %r1, %rows
  br i1 %r.more, label %row, label %cut
cut:
  %longest.up = add i64 %longest1, %span
  %longest.last = sub i64 %longest.up, 1
  %spans = udiv i64 %longest.last, %span
  %queries.up = add i64 %queries, {PART - 1}
  %parts = udiv i64 %queries.up, {PART}
  %places = mul i64 %heads, %spans
  %units = mul i64 %places, %parts
  %kept = mul i64 %places, %queries
  %floats = mul i64 %kept, %record
  %bytes = mul i64 %floats, 4
  %records = call ptr @malloc(i64 %bytes)
  %one.token = mul i64 %kv, %queries
  %one.head = mul i64 %one.token, %head
  %products = mul i64 %one.head, %tokens1
  %worth = sdiv i64 %products, {_SCORES}
{JOB.made("%units", "@spans", fields)}
  call void @run(ptr %api, ptr %ctx, ptr %job, i64 %worth)
  %mixes = mul i64 %outputs, %head
  %joins = sdiv i64 %mixes, {_JOINED}
{JOB.made("%outputs", "@join", fields, job="last")}
  call void @run(ptr %api, ptr %ctx, ptr %last, i64 %joins)
  call void @free(ptr %records)
  ret ptr null"""
    return frame.handler(header, "attend", _OPERANDS, body)
