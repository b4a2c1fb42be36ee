"""One job for several threads, those of XLA's own pool, as LLVM assembly.

The caller hires helpers; all claim units of work until there are none, and the caller waits for the units
that helpers have begun. A helper that starts late finds nothing left, and the last to leave frees the job.
"""

from collections.abc import Sequence

from . import cores
from .header import Header
from .target import Tile

# What every job begins with: units claimed, units done, who still holds it, how many units there are, how
# many are claimed at a time, the function `(job, from, to)` that does them, and the core of who called.
_COMMON = ("next", "done", "users", "units", "step", "function", "core")
# Turns of the waiting loop before a waiting thread offers its core to others.
_TURNS = 1 << 12
# Claims of each thread, were all as fast: small enough to end together, large enough to read on in order.
_CLAIMS = 8


class Job:
    """Where the fields of a job lie, eight bytes each.

    Attributes:
        names: of the fields that are not common to all jobs.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._all = _COMMON + self.names

    def made(self, units: str, function: str, values: dict[str, str], *, job: str = "job") -> str:
        """A new job as `%JOB`; `values` are LLVM operands with their types, by name of the field."""
        fixed = {"next": "i64 0", "done": "i64 0", "users": "i64 1", "units": f"i64 {units}"}
        lines = [f"  %{job} = call ptr @malloc(i64 {8 * len(self._all)})"]
        for name, value in {**fixed, "core": "i64 -1", "function": f"ptr {function}", **values}.items():
            lines += [self._at(name, f"{job}.made", job), f"  store {value}, ptr %{job}.made.{name}"]
        return "\n".join(lines)

    def loaded(self, pointers: Sequence[str]) -> str:
        """Every field of its own, as a name; those in `pointers` as pointers."""
        lines = []
        for name in self.names:
            kind = "ptr" if name in pointers else "i64"
            lines += [self._at(name, "at"), f"  %{name} = load {kind}, ptr %at.{name}"]
        return "\n".join(lines)

    def _at(self, name: str, prefix: str, job: str = "job") -> str:
        return f"  %{prefix}.{name} = getelementptr i64, ptr %{job}, i64 {self._all.index(name)}"


def source(header: Header, tile: Tile) -> str:
    """`@run(api, ctx, job, most)`: do a job with up to `most` threads, and let go of it."""
    parts = [_DECLARED, tile.pause[1], cores.source(tile.told), _WORK]
    return "\n".join([*parts, _forget(header), _run(header, tile)])


_DECLARED = """
declare ptr @malloc(i64)
declare void @free(ptr)
declare i32 @sched_yield()"""

_WORK = """
define internal void @work(ptr %job) {
  %at.done = getelementptr i64, ptr %job, i64 1
  %at.units = getelementptr i64, ptr %job, i64 3
  %at.step = getelementptr i64, ptr %job, i64 4
  %at.function = getelementptr i64, ptr %job, i64 5
  %units = load i64, ptr %at.units
  %step = load i64, ptr %at.step
  %function = load ptr, ptr %at.function
  br label %claim
claim:
  %from = atomicrmw add ptr %job, i64 %step monotonic
  %over = icmp sge i64 %from, %units
  br i1 %over, label %nothing, label %some
some:
  %beyond = add i64 %from, %step
  %to = call i64 @llvm.smin.i64(i64 %beyond, i64 %units)
  call void %function(ptr %job, i64 %from, i64 %to)
  %count = sub i64 %to, %from
  %before = atomicrmw add ptr %at.done, i64 %count release
  br label %claim
nothing:
  ret void
}
define internal void @leave(ptr %job) {
  %at.users = getelementptr i64, ptr %job, i64 2
  %users = atomicrmw sub ptr %at.users, i64 1 acq_rel
  %last = icmp eq i64 %users, 1
  br i1 %last, label %end, label %out
end:
  call void @free(ptr %job)
  br label %out
out:
  ret void
}
define internal void @help(ptr %job) {
  %at.core = getelementptr i64, ptr %job, i64 6
  %core = load i64, ptr %at.core
  call void @aside(i64 %core)
  call void @work(ptr %job)
  call void @leave(ptr %job)
  ret void
}"""


def call(header: Header, name: str, function: str, values: dict[str, str]) -> str:
    """Call a function of the interface, whose arguments are a struct: `%FUNCTION.gave` is what it gave.

    Args:
        header: of the interface.
        name: of the function, whose struct is `{name}_Args`.
        function: a prefix for names here.
        values: LLVM operands with their types, by name of the field.
    """
    size = header.size(f"{name}_Args")
    lines = [f"  %{function} = alloca [{size} x i8], align 8"]
    for field, value in {
        "struct_size": f"i64 {size}",
        "extension_start": "ptr null",
        **values,
    }.items():
        place = header.at(f"{name}_Args.{field}")
        lines += [
            f"  %{function}.{field} = getelementptr i8, ptr %{function}, i64 {place}",
            f"  store {value}, ptr %{function}.{field}",
        ]
    lines += [
        f"  %{function}.at = getelementptr i8, ptr %api, i64 {header.at(f'Api.{name}')}",
        f"  %{function}.code = load ptr, ptr %{function}.at",
        f"  %{function}.gave = call ptr %{function}.code(ptr %{function})",
    ]
    return "\n".join(lines)


def _forget(header: Header) -> str:
    """Destroy an error that a call of the interface gave, of which the caller is the owner."""
    return f"""
define internal void @forget(ptr %api, ptr %error) {{
  %none = icmp eq ptr %error, null
  br i1 %none, label %end, label %some
some:
{call(header, "Error_Destroy", "destroy", {"error": "ptr %error"})}
  br label %end
end:
  ret void
}}"""


def _run(header: Header, tile: Tile) -> str:
    count = call(header, "ThreadPool_NumThreads", "ask", {"ctx": "ptr %ctx", "num_threads": "ptr %threads"})
    fields = {"ctx": "ptr %ctx", "task": "ptr @help", "data": "ptr %job"}
    return f"""
define internal void @run(ptr %api, ptr %ctx, ptr %job, i64 %most) {{
entry:
  %at.done = getelementptr i64, ptr %job, i64 1
  %at.users = getelementptr i64, ptr %job, i64 2
  %at.units = getelementptr i64, ptr %job, i64 3
  %at.step = getelementptr i64, ptr %job, i64 4
  %units = load i64, ptr %at.units
  %threads = alloca i64
  store i64 1, ptr %threads
{count}
  call void @forget(ptr %api, ptr %ask.gave)
  %pool = load i64, ptr %threads
  %few = call i64 @llvm.smin.i64(i64 %most, i64 %units)
  %crew.most = call i64 @llvm.smin.i64(i64 %few, i64 %pool)
  %crew = call i64 @llvm.smax.i64(i64 %crew.most, i64 1)
  %claims = mul i64 %crew, {_CLAIMS}
  %step.down = udiv i64 %units, %claims
  %step = call i64 @llvm.smax.i64(i64 %step.down, i64 1)
  store i64 %step, ptr %at.step
  %at.core = getelementptr i64, ptr %job, i64 6
  %core = call i64 @core()
  store i64 %core, ptr %at.core
  br label %helpers
helpers:
  %h = phi i64 [1, %entry], [%h1, %hired]
  %h.more = icmp slt i64 %h, %crew
  br i1 %h.more, label %hire, label %own
hire:
  %joined = atomicrmw add ptr %at.users, i64 1 monotonic
  %refused = call ptr @schedule(ptr %api, ptr %ctx, ptr %job)
  %fine = icmp eq ptr %refused, null
  br i1 %fine, label %hired, label %alone
alone:
  %back = atomicrmw sub ptr %at.users, i64 1 monotonic
  call void @forget(ptr %api, ptr %refused)
  br label %own
hired:
  %h1 = add i64 %h, 1
  br label %helpers
own:
  call void @work(ptr %job)
  br label %wait
wait:
  %turn = phi i64 [0, %own], [%turn1, %again]
  %done = load atomic i64, ptr %at.done acquire, align 8
  %all = icmp sge i64 %done, %units
  br i1 %all, label %end, label %pause
pause:
  {tile.pause[0]}
  %turn1 = add i64 %turn, 1
  %turn.part = and i64 %turn1, {_TURNS - 1}
  %long = icmp eq i64 %turn.part, 0
  br i1 %long, label %offer, label %again
offer:
  %offered = call i32 @sched_yield()
  br label %again
again:
  br label %wait
end:
  call void @leave(ptr %job)
  ret void
}}
define internal ptr @schedule(ptr %api, ptr %ctx, ptr %job) {{
{call(header, "ThreadPool_Schedule", "ask", fields)}
  ret ptr %ask.gave
}}"""
