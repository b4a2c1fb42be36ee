"""Which core a thread runs on, and how it leaves it to another, as LLVM assembly.

A thread may be woken on the core of who woke it, or where it ran last, while another core is idle (seen on
Linux 6.18 in a virtual machine). It then takes turns with the caller until the system moves it, after about
2 ms.
"""

import ctypes
import os

# Bytes of a set of cores: the size that the C library's own has.
_MASK = 128


def source(told: bool) -> str:
    """`@core()`, -1 if that is not told, and `@aside(core)`: go elsewhere if the caller is on that core."""
    return _ASIDE if told else _ANYWHERE


def known(system: str) -> bool:
    """Whether a thread can tell its core and leave it, on a system that is named as `sys.platform` is."""
    names = ("sched_getcpu", "sched_getaffinity", "sched_setaffinity")
    return system == "linux" and all(hasattr(ctypes.CDLL(None), name) for name in names)


_ANYWHERE = """
define internal i64 @core() {
  ret i64 -1
}
define internal void @aside(i64 %core) {
  ret void
}"""

_ASIDE = f"""
declare i32 @sched_getcpu()
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @sched_setaffinity(i32, i64, ptr)
define internal i64 @core() {{
  %core = call i32 @sched_getcpu()
  %wide = sext i32 %core to i64
  ret i64 %wide
}}
; Leave a core to another thread, if one is there: by asking for any other. Only where a thread may run on all
; cores, since what it asks for is kept: asking for all of them again binds it to nothing.
define internal void @aside(i64 %core) {{
entry:
  %mine = call i64 @core()
  %same = icmp eq i64 %mine, %core
  %known = icmp ult i64 %core, {8 * _MASK}
  %go = and i1 %same, %known
  br i1 %go, label %ask, label %stay
ask:
  %allowed = alloca [{_MASK} x i8], align 8
  %asked = call i32 @sched_getaffinity(i32 0, i64 {_MASK}, ptr %allowed)
  %told = icmp eq i32 %asked, 0
  br i1 %told, label %count, label %stay
count:
  %i = phi i64 [0, %ask], [%i1, %count]
  %cores = phi i64 [0, %ask], [%cores1, %count]
  %at = getelementptr i64, ptr %allowed, i64 %i
  %word = load i64, ptr %at
  %some = call i64 @llvm.ctpop.i64(i64 %word)
  %cores1 = add i64 %cores, %some
  %i1 = add i64 %i, 1
  %more = icmp slt i64 %i1, {_MASK // 8}
  br i1 %more, label %count, label %counted
counted:
  %all = icmp eq i64 %cores1, {os.cpu_count() or 0}
  %several = icmp ugt i64 %cores1, 1
  %free = and i1 %all, %several
  br i1 %free, label %move, label %stay
move:
  call void @llvm.memset.p0.i64(ptr %allowed, i8 -1, i64 {_MASK}, i1 false)
  %byte = udiv i64 %core, 8
  %place = urem i64 %core, 8
  %byte.at = getelementptr i8, ptr %allowed, i64 %byte
  %shift = trunc i64 %place to i8
  %bit = shl i8 1, %shift
  %others = xor i8 %bit, -1
  store i8 %others, ptr %byte.at
  %moved = call i32 @sched_setaffinity(i32 0, i64 {_MASK}, ptr %allowed)
  store i8 -1, ptr %byte.at
  %back = call i32 @sched_setaffinity(i32 0, i64 {_MASK}, ptr %allowed)
  br label %stay
stay:
  ret void
}}"""
