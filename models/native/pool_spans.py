"""What spans of a row's tokens give for its queries, as LLVM assembly.

It is a record for each query: the mix of values, `head` floats, then the highest score and the sum of the
weights, and room to the next whole vector.
"""

from .crew import Job
from .target import Tile
from .vectors import number, splat, spread, vector

# Queries of a unit of work: few enough that what a page gives them stays in the nearest cache.
PART = 48
POINTERS = ("q", "k", "v", "table", "lengths", "h", "t", "m", "y", "records")
SIZES = ("kv", "queries", "head", "size", "pages", "width", "spans", "span", "parts", "record")
JOB = Job((*POINTERS, *SIZES))
_NONE = number(float("-inf"))


def source(tile: Tile, kind: str) -> str:
    """`@spans`, which does a job, and `@length`, the tokens of a row."""
    return "\n".join([_soften(tile), _page(tile), _table(), _spans(tile, kind)])


def rows(tile: Tile) -> int:
    """Queries that meet a page together: 16 of 32 registers hold their sums, or 12 of 16."""
    return 3 if tile.lanes == 8 else 4


def _soften(tile: Tile) -> str:
    """Scores of a page to weights, in place: those of `held` positions, and 0 behind them."""
    lanes, floats = tile.lanes, vector(tile)
    places = ", ".join(f"i64 {i}" for i in range(lanes))
    return f"""
define internal void @soften(ptr %s, i64 %columns, i64 %held, ptr %record, i64 %head) {{
entry:
  %at.highest = getelementptr float, ptr %record, i64 %head
  %at.total = getelementptr float, ptr %at.highest, i64 1
  %before = load float, ptr %at.highest
{spread(tile, "held.all", "%held", "i64")}
  br label %mask
mask:
  %c = phi i64 [0, %entry], [%c1, %mask]
  %most = phi {floats} [{splat(tile, float("-inf"))}, %entry], [%most1, %mask]
{spread(tile, "c.all", "%c", "i64")}
  %place = add <{lanes} x i64> %c.all, <{places}>
  %real = icmp slt <{lanes} x i64> %place, %held.all
  %at = getelementptr float, ptr %s, i64 %c
  %score = load {floats}, ptr %at, align 4
  %known = select <{lanes} x i1> %real, {floats} %score, {floats} {splat(tile, float("-inf"))}
  store {floats} %known, ptr %at, align 4
  %more = fcmp ogt {floats} %known, %most
  %most1 = select <{lanes} x i1> %more, {floats} %known, {floats} %most
  %c1 = add i64 %c, {lanes}
  %c.more = icmp slt i64 %c1, %columns
  br i1 %c.more, label %mask, label %topped
topped:
  ; Comparing has left out what is no number.
  %page = call nnan float @llvm.vector.reduce.fmax.v{lanes}f32({floats} %most1)
  %now = call float @higher(float %page, float %before)
  store float %now, ptr %at.highest
  ; Scores that are all -inf weigh 0, and -inf less -inf is no number.
  %far = fcmp oeq float %now, {_NONE}
  %top = select i1 %far, float 0.0, float %now
  %drop = fsub float %before, %top
  %shrink = call float @exp1(float %drop)
  %added = call float @weigh(ptr %s, i64 0, i64 %columns, float %top)
  %total = load float, ptr %at.total
  %less = fmul float %total, %shrink
  %total1 = fadd float %less, %added
  store float %total1, ptr %at.total
  call void @times(ptr %record, i64 %head, float %shrink)
  ret void
}}"""


def _page(tile: Tile) -> str:
    """`count` queries and one page, of whose positions `held` are read: V's others not at all."""
    return f"""
define internal void @page(i64 %count, ptr %q, ptr %k, ptr %v, ptr %s, ptr %r, i64 %held, i64 %head,
                           i64 %size, i64 %record, ptr %next) {{
entry:
  %k.int = ptrtoint ptr %k to i64
  %v.int = ptrtoint ptr %v to i64
  %next.int = ptrtoint ptr %next to i64
  %to.v = sub i64 %v.int, %k.int
  %to.next = sub i64 %next.int, %v.int
  %held.up = add i64 %held, {tile.lanes - 1}
  %vectors = sdiv i64 %held.up, {tile.lanes}
  %columns = mul i64 %vectors, {tile.lanes}
  %scores = mul i64 %count, %size
  %bytes = mul i64 %scores, 4
  call void @llvm.memset.p0.i64(ptr %s, i8 0, i64 %bytes, i1 false)
  call void @multiply(i64 %count, ptr %q, i64 %head, ptr %k, i64 %size, ptr %s, i64 %size, i64 %head,
                      i64 %columns, i64 %to.v)
  br label %query
query:
  %i = phi i64 [0, %entry], [%i1, %query]
  %si = mul i64 %i, %size
  %at.s = getelementptr float, ptr %s, i64 %si
  %ri = mul i64 %i, %record
  %at.r = getelementptr float, ptr %r, i64 %ri
  call void @soften(ptr %at.s, i64 %columns, i64 %held, ptr %at.r, i64 %head)
  %i1 = add i64 %i, 1
  %more = icmp slt i64 %i1, %count
  br i1 %more, label %query, label %mix
mix:
  call void @multiply(i64 %count, ptr %s, i64 %size, ptr %v, i64 %head, ptr %r, i64 %record, i64 %held,
                      i64 %head, i64 %to.next)
  ret void
}}"""


def _table() -> str:
    """Tokens of a row, clipped to what its table names, and where a kv head of a page is in the pool."""
    return """
define internal i64 @length(ptr %lengths, i64 %row, i64 %width, i64 %size) {
  %room = mul i64 %width, %size
  %length = call i64 @clipped(ptr %lengths, i64 %row, i64 %room)
  ret i64 %length
}
define internal i64 @box(ptr %table, i64 %skip, i64 %place, i64 %size, i64 %pages, i64 %kv, i64 %one) {
  %row = udiv i64 %place, %size
  %entry = add i64 %skip, %row
  %final = sub i64 %pages, 1
  %number = call i64 @clipped(ptr %table, i64 %entry, i64 %final)
  %before = mul i64 %number, %kv
  %box = add i64 %before, %one
  ret i64 %box
}"""


def _spans(tile: Tile, kind: str) -> str:
    """Units of a row, a kv head, a span and a part of the queries, of which the last vary first."""
    most = rows(tile)
    return f"""
define internal void @spans(ptr %job, i64 %from, i64 %to) {{
entry:
{JOB.loaded(pointers=POINTERS)}
  %scores = mul i64 %size, {most}
  %s = alloca float, i64 %scores, align 64
  %box = mul i64 %head, %size
  br label %unit
unit:
  %u = phi i64 [%from, %entry], [%u1, %united]
  %part = urem i64 %u, %parts
  %u.span = udiv i64 %u, %parts
  %place = urem i64 %u.span, %spans
  %u.head = udiv i64 %u.span, %spans
  %one = urem i64 %u.head, %kv
  %row = udiv i64 %u.head, %kv
  %length = call i64 @length(ptr %lengths, i64 %row, i64 %width, i64 %size)
  %begin = mul i64 %place, %span
  %end.far = add i64 %begin, %span
  %end = call i64 @llvm.smin.i64(i64 %end.far, i64 %length)
  %first = mul i64 %part, {PART}
  %last.far = add i64 %first, {PART}
  %last = call i64 @llvm.smin.i64(i64 %last.far, i64 %queries)
  %q.skip = mul i64 %u.head, %queries
  %r.skip = mul i64 %u.span, %queries
  %row.table = mul i64 %row, %width
  %some = icmp slt i64 %begin, %end
  br i1 %some, label %clear, label %united
clear:
  %x = phi i64 [%first, %unit], [%x1, %clear]
  %x.r = add i64 %r.skip, %x
  %x.place = mul i64 %x.r, %record
  %x.at = getelementptr float, ptr %records, i64 %x.place
  %x.bytes = mul i64 %record, 4
  call void @llvm.memset.p0.i64(ptr %x.at, i8 0, i64 %x.bytes, i1 false)
  %x.highest = getelementptr float, ptr %x.at, i64 %head
  store float {_NONE}, ptr %x.highest
  %x1 = add i64 %x, 1
  %x.more = icmp slt i64 %x1, %last
  br i1 %x.more, label %clear, label %page
page:
  %p = phi i64 [%begin, %clear], [%p1, %paged]
  %left = sub i64 %end, %p
  %held = call i64 @llvm.smin.i64(i64 %left, i64 %size)
  %p1 = add i64 %p, %size
  %p.more = icmp slt i64 %p1, %end
  %p.next = select i1 %p.more, i64 %p1, i64 %begin
  %one.after = add i64 %one, 1
  %one.next = select i1 %p.more, i64 %one, i64 %one.after
  %p.box = call i64 @box(ptr %table, i64 %row.table, i64 %p, i64 %size, i64 %pages, i64 %kv, i64 %one)
  ; What is read after this page: the next one, or most likely the first one of the next head.
  %n.box = call i64 @box(ptr %table, i64 %row.table, i64 %p.next, i64 %size, i64 %pages, i64 %kv,
                         i64 %one.next)
  %skip = mul i64 %p.box, %box
  %n.skip = mul i64 %n.box, %box
  %np = getelementptr {kind}, ptr %k, i64 %n.skip
  %kp = getelementptr {kind}, ptr %k, i64 %skip
  %vp = getelementptr {kind}, ptr %v, i64 %skip
  br label %block
block:
  %i = phi i64 [%first, %page], [%i1, %block]
  %rest = sub i64 %last, %i
  %rest.up = add i64 %rest, {most - 1}
  %blocks = udiv i64 %rest.up, {most}
  %share = add i64 %rest, %blocks
  %share.down = sub i64 %share, 1
  %count = udiv i64 %share.down, %blocks
  %i.q = add i64 %q.skip, %i
  %i.q.place = mul i64 %i.q, %head
  %qp = getelementptr float, ptr %q, i64 %i.q.place
  %i.r = add i64 %r.skip, %i
  %i.r.place = mul i64 %i.r, %record
  %rp = getelementptr float, ptr %records, i64 %i.r.place
  call void @page(i64 %count, ptr %qp, ptr %kp, ptr %vp, ptr %s, ptr %rp, i64 %held, i64 %head, i64 %size,
                  i64 %record, ptr %np)
  %i1 = add i64 %i, %count
  %i.more = icmp slt i64 %i1, %last
  br i1 %i.more, label %block, label %paged
paged:
  br i1 %p.more, label %page, label %united
united:
  %u1 = add i64 %u, 1
  %u.more = icmp slt i64 %u1, %to
  br i1 %u.more, label %unit, label %done
done:
  ret void
}}"""
