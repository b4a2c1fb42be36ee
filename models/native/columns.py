"""Rows laid out as columns, as LLVM assembly: a square of as many rows as a register has lanes at a time."""

from collections.abc import Sequence

from .target import Tile
from .vectors import vector


def source(tile: Tile, block: int) -> str:
    """`@columns(from, stride, to, length, size)`: rows `(length, size)` in blocks `(size, block)`.

    `from` has `stride` numbers from one row to the next; sizes and `block` are multiples of the lanes.
    Columns of a square past the last row hold that row again, those past it what they held.
    """
    lanes, floats = tile.lanes, vector(tile)
    turned, names = _transposed(tile, [f"v{row}" for row in range(lanes)])
    rows, loads, stores = [], [], []
    for row in range(lanes):
        rows += [
            f"  %at{row} = add i64 %first, {row}",
            f"  %row{row} = call i64 @llvm.smin.i64(i64 %at{row}, i64 %last)",
            f"  %skip{row} = mul i64 %row{row}, %stride",
            f"  %line{row} = getelementptr float, ptr %from, i64 %skip{row}",
        ]
        loads += [
            f"  %f{row} = getelementptr float, ptr %line{row}, i64 %d",
            f"  %v{row} = load {floats}, ptr %f{row}, align 4",
        ]
        stores += [
            f"  %t{row} = getelementptr float, ptr %place, i64 {row * block}",
            f"  store {floats} %{names[row]}, ptr %t{row}, align 4",
        ]
    lines = [
        "define internal void @columns(ptr %from, i64 %stride, ptr %to, i64 %length, i64 %size) {",
        "entry:", f"  %whole = mul i64 %size, {block}", "  %last = sub i64 %length, 1", "  br label %some",
        "some:", "  %first = phi i64 [0, %entry], [%first1, %moved]",
        f"  %number = udiv i64 %first, {block}", f"  %column = urem i64 %first, {block}",
        "  %blocks = mul i64 %number, %whole", "  %begin = add i64 %blocks, %column",
        "  %target = getelementptr float, ptr %to, i64 %begin", *rows, "  br label %move",
        "move:", "  %d = phi i64 [0, %some], [%d1, %move]", f"  %down = mul i64 %d, {block}",
        "  %place = getelementptr float, ptr %target, i64 %down", *loads, *turned, *stores,
        f"  %d1 = add i64 %d, {lanes}", "  %d.more = icmp slt i64 %d1, %size",
        "  br i1 %d.more, label %move, label %moved",
        "moved:", f"  %first1 = add i64 %first, {lanes}", "  %more = icmp slt i64 %first1, %length",
        "  br i1 %more, label %some, label %end",
        "end:", "  ret void", "}",
    ]  # fmt: skip
    return "\n".join(lines)


def _transposed(tile: Tile, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """A square of vectors, each a row, as its columns: its halves interleaved, as often as it halves."""
    lanes, floats = tile.lanes, vector(tile)
    half, lines, turn = lanes // 2, list[str](), 0
    while 1 << turn < lanes:
        found = []
        for place in range(lanes):
            side = place % 2  # which halves of the two vectors, whose numbers then take turns
            mask = [f"i32 {side * half + n // 2 + n % 2 * lanes}" for n in range(lanes)]
            pair = f"{floats} %{names[place // 2]}, {floats} %{names[place // 2 + half]}"
            lines.append(f"  %z{turn}.{place} = shufflevector {pair}, <{lanes} x i32> <{', '.join(mask)}>")
            found.append(f"z{turn}.{place}")
        names, turn = found, turn + 1
    return lines, list(names)
