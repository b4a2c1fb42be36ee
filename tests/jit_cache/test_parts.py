"""A model over two processes and a store: all load their parts, or all compile; on CPU."""

import pytest


@pytest.fixture(scope="module")
def found(two_processes, tmp_path_factory):
    """What both found in six starts of one pair of processes, and in one of another pair after it."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "home").mkdir(mode=0o700)
    first, second = (two_processes("parts_probe.py", folder, ports=7) for _ in range(2))
    return [one | other for one, other in zip(first, second, strict=True)]


LOADED = {"compiles": 0, "store": [3, 0]}


def test_S9_parts_of_a_program_are_compiled_once_and_loaded_at_the_next_starts(found):
    for process in found:
        assert process["first"] == {"compiles": 3, "store": [0, 3]}
        assert process["again"] == process["restarted"] == LOADED
        assert process["far"] <= 1e-5


def test_where_one_process_has_lost_a_part_all_compile_that_program(found):
    for process in found:
        assert process["lost"] == {"compiles": 1, "store": [2, 1]}
        assert process["healed"] == LOADED


def test_parts_of_two_compiles_are_not_mixed(found):
    for process in found:
        assert process["stale"] == {"compiles": 1, "store": [2, 1]}


def test_without_a_store_all_compile(found):
    for process in found:
        assert process["storeless"] == {"compiles": 3, "store": None}
