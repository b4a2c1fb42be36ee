"""Products of a few rows with some vectors of columns, whose sums stay in registers, as LLVM assembly."""

from .target import Tile

_FEW = 2  # vectors, so that a tile of the target's rows leaves registers for what is loaded


def source(tile: Tile) -> str:
    """`@few{vectors}(rows, a, lda, b, ldb, c, ldc, count)`: `c` becomes `a` times `b`.

    `a` is `(rows, count)`, `b` `(count, vectors)` and `c` `(rows, vectors)`, float32, with as many numbers
    from one row to the next as the `ld` of each says; `rows` is 1 to the target's.
    """
    counts = range(1, _FEW + 1)
    return "\n".join(_tile(tile, rows, vectors) for vectors in counts for rows in range(1, tile.rows + 1)) + (
        "\n".join(_choice(tile, vectors) for vectors in counts)
    )


_ARGUMENTS = "ptr %a, i64 %lda, ptr %b, i64 %ldb, ptr %c, i64 %ldc, i64 %count"


def _choice(tile: Tile, vectors: int) -> str:
    cases = " ".join(f"i64 {rows}, label %rows{rows}" for rows in range(1, tile.rows))
    calls = "\n".join(
        f"rows{rows}:\n  call void @few{vectors}_{rows}({_ARGUMENTS})\n  ret void"
        for rows in range(1, tile.rows + 1)
    )
    return f"""
define internal void @few{vectors}(i64 %rows, {_ARGUMENTS}) {{
  switch i64 %rows, label %rows{tile.rows} [{cases}]
{calls}
}}"""


def _tile(tile: Tile, rows: int, vectors: int) -> str:
    lanes, vector = tile.lanes, f"<{tile.lanes} x float>"
    cells = [(i, j) for i in range(rows) for j in range(vectors)]
    before, sums, work, after = [], [], [], []
    for i in range(rows):
        before += [f"  %o{i} = mul i64 %lda, {i}", f"  %a{i} = getelementptr float, ptr %a, i64 %o{i}"]
        after += [f"  %t{i} = mul i64 %ldc, {i}", f"  %c{i} = getelementptr float, ptr %c, i64 %t{i}"]
    for j in range(vectors):
        work += [
            f"  %p{j} = getelementptr {vector}, ptr %row, i64 {j}",
            f"  %b{j} = load {vector}, ptr %p{j}, align 4",
        ]
    for i in range(rows):
        work += [
            f"  %x{i} = getelementptr float, ptr %a{i}, i64 %k",
            f"  %f{i} = load float, ptr %x{i}, align 4",
            f"  %i{i} = insertelement {vector} poison, float %f{i}, i64 0",
            f"  %v{i} = shufflevector {vector} %i{i}, {vector} poison, <{lanes} x i32> zeroinitializer",
        ]
    for i, j in cells:
        sums.append(f"  %s{i}_{j} = phi {vector} [zeroinitializer, %entry], [%n{i}_{j}, %loop]")
        operands = f"{vector} %v{i}, {vector} %b{j}, {vector} %s{i}_{j}"
        work.append(f"  %n{i}_{j} = call {vector} @llvm.fma.v{lanes}f32({operands})")
        after += [
            f"  %d{i}_{j} = getelementptr {vector}, ptr %c{i}, i64 {j}",
            f"  store {vector} %n{i}_{j}, ptr %d{i}_{j}, align 4",
        ]
    lines = [
        f"define internal void @few{vectors}_{rows}({_ARGUMENTS}) {{",
        "entry:", *before, "  br label %loop",
        "loop:", "  %k = phi i64 [0, %entry], [%k1, %loop]", *sums,
        "  %place = mul i64 %k, %ldb", "  %row = getelementptr float, ptr %b, i64 %place",
        *work,
        "  %k1 = add i64 %k, 1", "  %more = icmp slt i64 %k1, %count",
        "  br i1 %more, label %loop, label %end",
        "end:", *after, "  ret void", "}",
    ]  # fmt: skip
    return "\n".join(lines)
