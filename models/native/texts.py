"""Which keys of a row may hold the texts of some queries, as LLVM assembly."""

# Padding, 0, becomes a number behind all others, since it mostly stands behind them; places past the row's
# end get the one after.
_PADDING = 2**31 - 2


def source(block: int) -> str:
    """Texts of a row by place, their reach in each block of keys, and the blocks of a few queries.

    `@texts(own, held, length, padded)`, `@reaches(held, padded, reaches)` and
    `@range(reaches, queries, rows, padded, from, to)`, which stores the first place and the one after
    the last.
    """
    wide = f"<{block} x i32>"
    return f"""
define internal void @texts(ptr %own, ptr %held, i64 %length, i64 %padded) {{
entry:
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i1, %kept]
  %to = getelementptr i32, ptr %held, i64 %i
  %real = icmp slt i64 %i, %length
  br i1 %real, label %copy, label %kept
copy:
  %from = getelementptr i32, ptr %own, i64 %i
  %t = load i32, ptr %from
  %none = icmp eq i32 %t, 0
  %copied = select i1 %none, i32 {_PADDING}, i32 %t
  br label %kept
kept:
  %text = phi i32 [{_PADDING + 1}, %loop], [%copied, %copy]
  store i32 %text, ptr %to
  %i1 = add i64 %i, 1
  %more = icmp slt i64 %i1, %padded
  br i1 %more, label %loop, label %end
end:
  ret void
}}
; The lowest and the highest text of each block.
define internal void @reaches(ptr %texts, i64 %padded, ptr %reaches) {{
entry:
  br label %block
block:
  %i = phi i64 [0, %entry], [%i1, %block]
  %at = getelementptr i32, ptr %texts, i64 %i
  %t = load {wide}, ptr %at, align 4
  %low = call i32 @llvm.vector.reduce.smin.v{block}i32({wide} %t)
  %high = call i32 @llvm.vector.reduce.smax.v{block}i32({wide} %t)
  %number = udiv i64 %i, {block // 2}
  %low.at = getelementptr i32, ptr %reaches, i64 %number
  store i32 %low, ptr %low.at
  %high.at = getelementptr i32, ptr %low.at, i64 1
  store i32 %high, ptr %high.at
  %i1 = add i64 %i, {block}
  %more = icmp slt i64 %i1, %padded
  br i1 %more, label %block, label %end
end:
  ret void
}}
; From the first to the last block that may hold one of some texts.
define internal void @range(ptr %reaches, ptr %own, i64 %rows, i64 %padded, ptr %from, ptr %to) {{
entry:
  %any = load i32, ptr %own
  br label %reach
reach:
  %r = phi i64 [0, %entry], [%r1, %reach]
  %low = phi i32 [%any, %entry], [%low1, %reach]
  %high = phi i32 [%any, %entry], [%high1, %reach]
  %at = getelementptr i32, ptr %own, i64 %r
  %t = load i32, ptr %at
  %low1 = call i32 @llvm.smin.i32(i32 %low, i32 %t)
  %high1 = call i32 @llvm.smax.i32(i32 %high, i32 %t)
  %r1 = add i64 %r, 1
  %more = icmp slt i64 %r1, %rows
  br i1 %more, label %reach, label %search
search:
  br label %look
look:
  %i = phi i64 [0, %search], [%i1, %look]
  %first = phi i64 [%padded, %search], [%first1, %look]
  %last = phi i64 [0, %search], [%last1, %look]
  %number = udiv i64 %i, {block // 2}
  %low.at = getelementptr i32, ptr %reaches, i64 %number
  %least = load i32, ptr %low.at
  %high.at = getelementptr i32, ptr %low.at, i64 1
  %most = load i32, ptr %high.at
  %above = icmp sge i32 %most, %low1
  %below = icmp sle i32 %least, %high1
  %in = and i1 %above, %below
  %i1 = add i64 %i, {block}
  %earlier = call i64 @llvm.smin.i64(i64 %first, i64 %i)
  %first1 = select i1 %in, i64 %earlier, i64 %first
  %last1 = select i1 %in, i64 %i1, i64 %last
  %i.more = icmp slt i64 %i1, %padded
  br i1 %i.more, label %look, label %end
end:
  store i64 %first1, ptr %from
  store i64 %last1, ptr %to
  ret void
}}"""
