"""What the command line shows on stderr: a progress bar with ETA, plain lines where there is no terminal."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table


class Step(Protocol):
    """One step of a warm-up."""

    @property
    def bucket(self) -> Any: ...  # noqa: D102
    @property
    def done(self) -> int: ...  # noqa: D102
    @property
    def total(self) -> int: ...  # noqa: D102
    @property
    def elapsed_s(self) -> float: ...  # noqa: D102
    @property
    def error(self) -> str | None: ...  # noqa: D102
    @property
    def failed(self) -> int: ...  # noqa: D102


class WarmupView:
    """Shows warm-up steps; called from the warm-up thread."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[bucket]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._unsaid: dict[str, dict[Hashable, str]] = {}
        self._said: dict[str, set[str]] = {}

    def __call__(self, model: str, step: Step) -> None:
        """One more bucket of a model is done."""
        if step.error is not None:
            self._unsaid.setdefault(model, {})[step.bucket] = step.error
        if (
            step.error is None or step.done == step.total
        ):  # a fault of the model itself is told once, at the end
            self._say_failed(model)
        failed = f", {step.failed} failed" if step.failed else ""
        if not self._console.is_terminal:
            if step.done == step.total or step.done % max(1, step.total // 10) == 0:
                warm = f"{step.done - step.failed} of {step.total} programs are warm"
                line = f"{model}: {warm}{failed} after {step.elapsed_s:.1f} s"
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        if model not in self._tasks:
            self._progress.start()
            self._tasks[model] = self._progress.add_task(f"warming {model}", total=step.total, bucket="")
        self._progress.update(self._tasks[model], completed=step.done, bucket=f"{step.bucket}{failed}")
        if step.done == step.total:
            self.close()

    def show_plan(self, model: str, plan: Any) -> None:
        """The memory plan of a model, before anything is allocated."""
        self._console.print(f"{model}: {plan.explain()}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Says what failed and leaves the terminal as it was."""
        for model in list(self._unsaid):
            self._say_failed(model)
        self._progress.stop()

    def rest_of(self, error: BaseException) -> str:
        """What an error says, but for what was said of single buckets before."""
        text = str(error) or type(error).__name__
        for one in set().union(*self._said.values()):
            text = text.replace(one, "see above")
        return text

    def _say_failed(self, model: str) -> None:
        from ...jit_cache.warmup import alike_failures  # at hand by now; the command's help needs no JAX

        said = self._said.setdefault(model, set())
        for where, error, count in alike_failures(self._unsaid.pop(model, {})):
            if error in said:
                continue
            said.add(error)
            line = f"{model}: {'bucket ' if count == 1 else ''}{where} failed: {error}"
            self._console.print(line, style="red", markup=False, soft_wrap=True)


def warm_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The programs of a warm-up as a table."""
    table = Table(title="programs")
    for heading in ("model", "bucket", "from"):
        table.add_column(heading)
    for heading in ("ready s", "compile s", "run ms", "code kB", "scratch MB"):
        table.add_column(heading, justify="right")
    failed = any(row["error"] is not None for row in rows)
    if failed:
        table.add_column("error", overflow="fold")
    for row in rows:
        if row["error"] is not None:
            table.add_row(row["model"], row["bucket"], "", "", "", "", "", "", row["error"])
            continue
        table.add_row(
            row["model"],
            row["bucket"],
            row["source"],
            f"{row['ready_s']:.2f}",
            f"{row['compile_s']:.2f}",
            f"{row['run_ms']:.2f}",
            f"{row['code_bytes'] / 1e3:.0f}",
            f"{row['temp_bytes'] / 1e6:.1f}",
        )
    return table
