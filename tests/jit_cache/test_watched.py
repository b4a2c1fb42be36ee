"""Code that changes while it is compiled: its programs are kept under no key that is not theirs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from servax.bucketing import Bucket
from servax.jit_cache import Program, Servable, StoredPrograms, stored
from servax.jit_cache.store import Store

FACTOR = 2.0


def scaled(params: Any, x: Any) -> Any:
    return {"y": x * (params * FACTOR)}


def make() -> Servable:
    return Servable(scaled, np.float32(1), inputs={"x": "float32[n]"}, limits={"n": 8, "batch": 2})


def program(
    source: StoredPrograms, servable: Servable, bucket: str = "2x8", *, infer: bool = True
) -> Program:
    if infer:
        source.infer_outputs(servable)
    leaves = [jax.device_put(leaf) for leaf in servable.leaves]
    return source(servable, Bucket.parse(bucket, servable.grid.axes), leaves)


def factor_of(made: Program) -> float:
    return float(np.asarray(made({"x": np.ones((2, 8), np.float32)})[0])[0, 0])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "programs", home=tmp_path / "home", trial=None)


@pytest.fixture
def set_factor() -> Iterator[Callable[[float], None]]:
    def change(value: float) -> None:
        globals()["FACTOR"] = value

    yield change
    change(2.0)


def test_a_program_of_code_that_changed_since_is_neither_stored_nor_shared(
    store: Store, set_factor: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    source, servable = StoredPrograms(store), make()
    source.infer_outputs(servable)  # the key is made here
    set_factor(3.0)
    changed = program(source, servable, infer=False)
    assert (factor_of(changed), changed.facts.source) == (3.0, "compiled")
    assert "changed while it was traced" in caplog.text
    set_factor(2.0)
    others = [program(source, make()), program(StoredPrograms(store), make())]
    assert [one.facts.source for one in others] == ["compiled", "store"]
    assert [factor_of(one) for one in others] == [2.0, 2.0]


@pytest.mark.parametrize("back", [False, True])
def test_a_change_in_the_midst_of_a_trace_is_seen(
    store: Store, set_factor: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, *, back: bool
) -> None:
    source, servable = StoredPrograms(store), make()
    source.infer_outputs(servable)
    if back:  # it is another one before the trace, and what it was soon after
        set_factor(3.0)
    made = stored.build

    def changing(*args: Any) -> Any:
        set_factor(3.0)
        found = made(*args)
        set_factor(2.0 if back else 3.0)
        return found

    monkeypatch.setattr(stored, "build", changing)
    assert factor_of(program(source, servable)) == 3.0
    monkeypatch.setattr(stored, "build", made)
    set_factor(2.0)
    for other in (source, StoredPrograms(store)):
        assert factor_of(program(other, make())) == 2.0


def test_once_it_is_still_the_same_code_its_programs_are_kept_by_its_new_key(
    store: Store, set_factor: Callable[[float], None]
) -> None:
    source, servable = StoredPrograms(store), make()
    source.infer_outputs(servable)
    set_factor(3.0)
    program(source, servable)
    program(source, servable, "1x8")
    again = StoredPrograms(store)
    assert program(again, make(), "1x8").facts.source == "store"
    assert program(again, make(), "2x8").facts.source == "compiled"


def test_a_function_that_fills_a_table_at_its_first_trace_is_stored(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    table: dict[str, float] = {}

    def fill(params: Any, x: Any) -> Any:
        return {"y": x * (params * table.setdefault("factor", 2.0))}

    def ask() -> str:
        table.clear()  # as a new process would find it
        servable = Servable(fill, np.float32(1), inputs={"x": "float32[n]"}, limits={"n": 8, "batch": 2})
        return program(StoredPrograms(store), servable).facts.source

    assert [ask(), ask()] == ["compiled", "store"]
    assert not caplog.text


def test_what_a_library_sets_at_the_first_trace_is_no_change(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def ask() -> list[str]:
        mesh = jax.make_mesh((1,), ("d",))  # `shard_map` fills in the names of its axes when it is called
        double = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
        servable = Servable(
            lambda params, x: {"y": double(x) * params},
            np.float32(1),
            inputs={"x": "float32[n]"},
            limits={"n": 8, "batch": 2},
        )
        source = StoredPrograms(store)
        return [program(source, servable, bucket).facts.source for bucket in ("2x8", "1x8")]

    assert [ask(), ask()] == [["compiled"] * 2, ["store"] * 2]
    assert not caplog.text


def test_a_function_that_counts_its_traces_is_compiled_each_time_with_one_warning(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    traces: list[int] = []

    def counting(params: Any, x: Any) -> Any:
        traces.append(0)
        return {"y": x * params}

    source = StoredPrograms(store)
    servable = Servable(counting, np.float32(1), inputs={"x": "float32[n]"}, limits={"n": 8, "batch": 2})
    assert {program(source, servable, bucket).facts.source for bucket in ("2x8", "1x8")} == {"compiled"}
    assert caplog.text.count("changed while it was traced") == 1
    assert store.report().compiled == 2
