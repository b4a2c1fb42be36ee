"""Run times beside stored programs: hints that survive a restart and never hurt."""

from pathlib import Path

import pytest
from servax.jit_cache.store.timings import Timings


def test_kept_between_processes(tmp_path: Path) -> None:
    first = Timings(tmp_path / "timings.json")
    assert first.get("a") is None
    first.set("a", 0.25)
    first.set("gone", 1.0)
    assert first.save(frozenset({"a"}))
    second = Timings(tmp_path / "timings.json")
    assert (second.get("a"), second.get("gone")) == (0.25, None)


def test_two_processes_both_keep_their_news(tmp_path: Path) -> None:
    one, two = Timings(tmp_path / "t"), Timings(tmp_path / "t")
    one.set("a", 1.0)
    two.set("b", 2.0)
    both = frozenset({"a", "b"})
    assert one.save(both)
    assert two.save(both)
    after = Timings(tmp_path / "t")
    assert (after.get("a"), after.get("b")) == (1.0, 2.0)


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", '{"a": "x"}', '{"a": NaN}', '{"a": -1}', '{"a": 1e9}', "\x00"]
)
def test_nonsense_on_disk_is_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    timings = Timings(path)
    assert timings.get("a") is None
    timings.set("a", 1.0)
    assert timings.save(frozenset({"a"}))
    assert Timings(path).get("a") == 1.0


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    timings = Timings(tmp_path / "missing" / "t")
    timings.set("a", 1.0)
    assert not timings.save(frozenset({"a"}))
    assert timings.get("a") == 1.0
    assert list(tmp_path.iterdir()) == []
