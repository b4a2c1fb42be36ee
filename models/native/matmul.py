"""The product of activations with a matrix in panels, as LLVM assembly.

A panel holds `width` columns of the matrix, row after row, so that a product reads the matrix once, in
order, and whole vectors at a time (the packed operand of Goto & van de Geijn 2008,
doi:10.1145/1356052.1356053, kept instead of made at each call). The sums of a tile stay in registers while
the panel goes by. Each runs over the features in order, whatever the number of rows, so a row's result
depends on no other, to the bit.
"""

from collections.abc import Iterator

from . import frame, scaled, tiles
from .crew import Job
from .element import Element
from .header import Header
from .target import Tile
from .vectors import spread

# Rows that meet a panel before its next reader may take over; a unit is then about 40 us of a core.
_ROWS = 64
# Multiplications, or pairs or fours of them, that are worth waking a thread for, which takes about 5 us. Of
# one row they take 10, as they wait for memory; twice as many cost SmolLM2's products in bfloat16 3 % of that
# step.
_WORTH_A_THREAD = 1 << 16
_JOB = ("a", "w", "c", "rows", "out", "in", "parts")


def source(header: Header, tile: Tile, element: Element) -> str:
    """`@product` is what XLA calls, for `(rows, in)` of that kind, panels, a layer's number, and how many
    rows are multiplied: those behind them give zeros.

    Two numbers in bfloat16, or four in int8, stand where one in float32 does, so that all but the multiplying
    is the same.
    """
    return "\n".join(
        [
            element.declared(tile),
            *_tiles(tile, element),
            _unit(tile, element),
            _handler(header, tile, element),
        ]
    )


def _further(element: Element, ending: str = "") -> str:
    """Arguments of a tile behind the others."""
    return "".join(f", ptr %{name}{ending}" for name in scaled.OPERANDS) if element.scaled else ""


def _job(element: Element) -> Job:
    return Job(_JOB + (scaled.OPERANDS if element.scaled else ()))


def _tiles(tile: Tile, element: Element) -> Iterator[str]:
    yield from (_tile(tile, element, rows) for rows in range(1, tile.rows + 1))
    given = f"ptr %a, ptr %b, ptr %c, i64 %ldc, i64 %in{_further(element)}"
    yield tiles.choice("tiles", tile.rows, "tile", given)


def _tile(tile: Tile, element: Element, rows: int) -> str:
    """`rows` of `a` times a panel into `rows` of `c`, `ldc` floats apart; `in` counts four bytes of each."""
    vector = f"<{tile.lanes} x {element.total}>"
    cells = [(i, j) for i in range(rows) for j in range(tile.vectors)]
    sums = [f"  %s{i}_{j} = phi {vector} [zeroinitializer, %entry], [%n{i}_{j}, %loop]" for i, j in cells]
    pointers = [
        f"  %o{i} = mul i64 %in, {i}\n  %a{i} = getelementptr float, ptr %a, i64 %o{i}" for i in range(rows)
    ]
    # One or two rows only wait for memory, which is asked for a few rows of the panel ahead.
    ahead = (
        [f"  %far = getelementptr {vector}, ptr %row, i64 {24 * tile.vectors}",
         "  call void @llvm.prefetch.p0(ptr %far, i32 0, i32 3, i32 1)"] if rows <= 2 else []
    )  # fmt: skip
    starts = [
        f"  %t{i} = mul i64 %ldc, {i}\n  %c{i} = getelementptr float, ptr %c, i64 %t{i}" for i in range(rows)
    ]
    lines = [
        f"define internal void @tile{rows}(ptr %a, ptr noalias %b, ptr noalias %c, i64 %ldc, i64 %in"
        f"{_further(element)}) {{",
        "entry:", *pointers, "  br label %loop",
        "loop:", "  %k = phi i64 [0, %entry], [%k1, %loop]", *sums,
        f"  %place = mul i64 %k, {tile.width}", "  %row = getelementptr float, ptr %b, i64 %place",
        *ahead, *_step(tile, element, rows),
        "  %k1 = add i64 %k, 1", "  %more = icmp slt i64 %k1, %in", "  br i1 %more, label %loop, label %end",
        "end:", *starts, *_stored(tile, element, cells), "  ret void", "}",
    ]  # fmt: skip
    return "\n".join(lines)


def _stored(tile: Tile, element: Element, cells: list[tuple[int, int]]) -> Iterator[str]:
    """The sums `%n`, or what becomes of them, into the rows `%c`."""
    if element.scaled:
        yield from scaled.ended(tile, cells[-1][0] + 1)
    floats, name = f"<{tile.lanes} x float>", "y" if element.scaled else "n"
    for i, j in cells:
        yield f"  %d{i}_{j} = getelementptr {floats}, ptr %c{i}, i64 {j}"
        yield f"  store {floats} %{name}{i}_{j}, ptr %d{i}_{j}, align 4"


def _step(tile: Tile, element: Element, rows: int) -> Iterator[str]:
    """Four bytes of each row of `a` times a row of the panel, added to the sums `%s` as `%n`."""
    vector = f"<{tile.lanes} x {element.total}>"
    weights = []
    for j in range(tile.vectors):
        yield f"  %p{j} = getelementptr {vector}, ptr %row, i64 {j}"
        yield f"  %b{j} = load {vector}, ptr %p{j}, align 4"
        lines, parts = element.parts(tile, f"b{j}")
        yield from lines
        weights.append(parts)
    for i in range(rows):
        yield f"  %x{i} = getelementptr float, ptr %a{i}, i64 %k"
        yield f"  %f{i} = load {element.total}, ptr %x{i}, align 4"
        yield spread(tile, f"v{i}", f"%f{i}", element.total)
        lines, parts = element.parts(tile, f"v{i}")
        yield from lines
        names = ["s", *(f"m{place}_" for place in range(1, len(parts))), "n"]
        for place, x in enumerate(parts):
            for j in range(tile.vectors):
                product = element.multiply(tile, f"{names[place]}{i}_{j}", x, weights[j][place])
                yield f"  %{names[place + 1]}{i}_{j} = {product}"


def _unit(tile: Tile, element: Element) -> str:
    """Units of rows and panels, those of one panel after one another."""
    further, pointers = _further(element, ".here"), ("a", "w", "c", *scaled.OPERANDS)
    return f"""
define internal void @units(ptr %job, i64 %from, i64 %to) {{
entry:
  %aside = alloca [{tile.rows * tile.width} x float], align 64
{_job(element).loaded(pointers)}
  %panel = mul i64 %in, {tile.width}
  br label %unit
unit:
  %u = phi i64 [%from, %entry], [%u1, %united]
  %p = udiv i64 %u, %parts
  %part = urem i64 %u, %parts
  %first = mul i64 %part, {_ROWS}
  %behind = add i64 %first, {_ROWS}
  %last = call i64 @llvm.smin.i64(i64 %behind, i64 %rows)
  %skip = mul i64 %p, %panel
  %b = getelementptr float, ptr %w, i64 %skip
  %column = mul i64 %p, {tile.width}
{scaled.of_panel() if element.scaled else ""}
  %left = sub i64 %out, %column
  %whole = icmp sge i64 %left, {tile.width}
  br label %tile
tile:
  %r = phi i64 [%first, %unit], [%r1, %tiled]
  %rest = sub i64 %last, %r
  %rest.up = add i64 %rest, {tile.rows - 1}
  %tiles = udiv i64 %rest.up, {tile.rows}
  %share = add i64 %rest, %tiles
  %share.down = sub i64 %share, 1
  %m = udiv i64 %share.down, %tiles
  %ra = mul i64 %r, %in
  %ap = getelementptr float, ptr %a, i64 %ra
  %rc = mul i64 %r, %out
  %place = add i64 %rc, %column
  %cp = getelementptr float, ptr %c, i64 %place
{scaled.of_rows() if element.scaled else ""}
  br i1 %whole, label %direct, label %narrow
direct:
  call void @tiles(i64 %m, ptr %ap, ptr %b, ptr %cp, i64 %out, i64 %in{further})
  br label %tiled
narrow:
  call void @tiles(i64 %m, ptr %ap, ptr %b, ptr %aside, i64 {tile.width}, i64 %in{further})
  br label %line
line:
  %l = phi i64 [0, %narrow], [%l1, %lined]
  %lf = mul i64 %l, {tile.width}
  %lt = mul i64 %l, %out
  br label %copy
copy:
  %q = phi i64 [0, %line], [%q1, %copy]
  %qf = add i64 %lf, %q
  %qt = add i64 %lt, %q
  %pf = getelementptr float, ptr %aside, i64 %qf
  %pt = getelementptr float, ptr %cp, i64 %qt
  %one = load float, ptr %pf
  store float %one, ptr %pt
  %q1 = add i64 %q, 1
  %q.more = icmp slt i64 %q1, %left
  br i1 %q.more, label %copy, label %lined
lined:
  %l1 = add i64 %l, 1
  %l.more = icmp slt i64 %l1, %m
  br i1 %l.more, label %line, label %tiled
tiled:
  %r1 = add i64 %r, %m
  %r.more = icmp slt i64 %r1, %last
  br i1 %r.more, label %tile, label %united
united:
  %u1 = add i64 %u, 1
  %u.more = icmp slt i64 %u1, %to
  br i1 %u.more, label %unit, label %end
end:
  ret void
}}"""


def _handler(header: Header, tile: Tile, element: Element) -> str:
    fields = {name: f"i64 %{name}" for name in ("rows", "out", "in", "parts")}
    pointers = {"a": "ptr %a.data", "w": "ptr %layer.w", "c": "ptr %c.data"}
    if element.scaled:
        pointers |= scaled.fields()
    body = f"""
{frame.size("rows.all", "c", 0)}
{frame.size("out", "c", 1)}
{frame.size("in", "w", 2)}
{frame.size("layers", "w", 0)}
{frame.size("panels", "w", 1)}
  %final = sub i64 %layers, 1
  %layer = call i64 @clipped(ptr %n.data, i64 0, i64 %final)
  %panel = mul i64 %in, {tile.width}
  %whole = mul i64 %panel, %panels
  %skip = mul i64 %whole, %layer
  %layer.w = getelementptr float, ptr %w.data, i64 %skip
{scaled.of_layer(tile) if element.scaled else ""}
  %rows = call i64 @clipped(ptr %live.data, i64 0, i64 %rows.all)
  call void @cleared(ptr %c.data, i64 %rows, i64 %rows.all, i64 %out)
  %rows.up = add i64 %rows, {_ROWS - 1}
  %parts = udiv i64 %rows.up, {_ROWS}
  %units = mul i64 %parts, %panels
  %none = icmp eq i64 %units, 0
  br i1 %none, label %empty, label %some
empty:
  ret ptr null
some:
  %multiplications = mul i64 %rows, %whole
  %worth = sdiv i64 %multiplications, {_WORTH_A_THREAD}
{_job(element).made("%units", "@units", fields | pointers)}
  call void @run(ptr %api, ptr %ctx, ptr %job, i64 %worth)
  ret ptr null"""
    operands = ("a", "w", "n", "live", *(scaled.OPERANDS if element.scaled else ()), "c")
    return frame.handler(header, "product", operands, body)
