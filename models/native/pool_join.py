"""What all spans of a row give together, as LLVM assembly."""

from .pool_spans import JOB, POINTERS
from .target import Tile
from .vectors import spread, vector


def source(tile: Tile) -> str:
    """Units of a query: its own chunk's sums and those of its spans, in order, over the sum of weights."""
    floats, lanes = vector(tile), tile.lanes

    def over(name: str, before: str, after: str, work: str) -> str:
        """A loop over a head."""
        return f"""
{name}:
  %{name}.d = phi i64 [0, %{before}], [%{name}.d1, %{name}]
  %{name}.y = getelementptr float, ptr %yq, i64 %{name}.d
{work}
  store {floats} %{name}.now, ptr %{name}.y, align 4
  %{name}.d1 = add i64 %{name}.d, {lanes}
  %{name}.more = icmp slt i64 %{name}.d1, %head
  br i1 %{name}.more, label %{name}, label %{after}"""

    def load(name: str, base: str) -> str:
        where = f"  %{name}.at = getelementptr float, ptr {base}, i64 %{name.split('.')[0]}.d"
        return f"{where}\n  %{name} = load {floats}, ptr %{name}.at, align 4"

    copy = load("own.now", "%mq")
    add = f"""{load("add.y0", "%yq")}
{load("add.s", "%rp")}
  %add.less = fmul {floats} %add.y0, %a.all
  %add.more0 = fmul {floats} %add.s, %b.all
  %add.now = fadd {floats} %add.less, %add.more0"""
    part = f"{load('part.y0', '%yq')}\n  %part.now = fdiv {floats} %part.y0, %t.all"
    return f"""
define internal void @join(ptr %job, i64 %from, i64 %to) {{
entry:
{JOB.loaded(pointers=POINTERS)}
  br label %unit
unit:
  %u = phi i64 [%from, %entry], [%u1, %part.end]
  %query = urem i64 %u, %queries
  %u.head = udiv i64 %u, %queries
  %row = udiv i64 %u.head, %kv
  %length = call i64 @length(ptr %lengths, i64 %row, i64 %width, i64 %size)
  %places = mul i64 %u, %head
  %mq = getelementptr float, ptr %m, i64 %places
  %yq = getelementptr float, ptr %y, i64 %places
  %hq.at = getelementptr float, ptr %h, i64 %u
  %tq.at = getelementptr float, ptr %t, i64 %u
  %hq = load float, ptr %hq.at
  %tq = load float, ptr %tq.at
  %u.spans = mul i64 %u.head, %spans
  br label %own
{over("own", "unit", "look", copy)}
look:
  %h0 = phi float [%hq, %own], [%now, %add]
  %t0 = phi float [%tq, %own], [%t1, %add]
  %g = phi i64 [0, %own], [%g1, %add]
  %begin = mul i64 %g, %span
  %there = icmp slt i64 %begin, %length
  br i1 %there, label %one, label %divide
one:
  %g.place = add i64 %u.spans, %g
  %g.query = mul i64 %g.place, %queries
  %g.at = add i64 %g.query, %query
  %g.skip = mul i64 %g.at, %record
  %rp = getelementptr float, ptr %records, i64 %g.skip
  %hs.at = getelementptr float, ptr %rp, i64 %head
  %ts.at = getelementptr float, ptr %hs.at, i64 1
  %hs = load float, ptr %hs.at
  %ts = load float, ptr %ts.at
  %now = call float @higher(float %hs, float %h0)
  %a.x = fsub float %h0, %now
  %a = call float @exp1(float %a.x)
  %b.x = fsub float %hs, %now
  %b = call float @exp1(float %b.x)
  %t.less = fmul float %t0, %a
  %t.more = fmul float %ts, %b
  %t1 = fadd float %t.less, %t.more
{spread(tile, "a.all", "%a")}
{spread(tile, "b.all", "%b")}
  %g1 = add i64 %g, 1
  br label %add
{over("add", "one", "look", add)}
divide:
{spread(tile, "t.all", "%t0")}
  br label %part
{over("part", "divide", "part.end", part)}
part.end:
  %u1 = add i64 %u, 1
  %u.more = icmp slt i64 %u1, %to
  br i1 %u.more, label %unit, label %done
done:
  ret void
}}"""
