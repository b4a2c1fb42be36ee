import re
from pathlib import Path
from typing import Any

import pytest
import servax


def test_the_data_loader_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(servax.__file__).parent / "docs" / "data_loader.md"
    if not page.exists():
        pytest.skip("the docs are not part of the installed package")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(page), "exec"), names)
    printed = capsys.readouterr().out
    shapes, padding = re.search(r"(\d+) shapes, ([\d.]+)% padding", printed).groups()
    assert int(shapes) <= len(names["grid"])
    on_ladder, on_powers = re.findall(r"lengths rounded up to .*: ([\d.]+)%", printed)
    assert float(padding) < float(on_ladder) + 3 < float(on_powers)
    assert float(re.search(r"packed: \d+ rows, ([\d.]+)%", printed)[1]) < 6
    assert sum(map(len, names["packing"].gather(names["ids"]))) == names["lengths"].sum()
    seen = [tuple(row) for batch in names["batches"](names["dataset"]) for row in _rows(batch)]
    assert sorted(seen) == sorted(tuple(example["ids"].tolist()) for example in names["dataset"])


def _rows(batch: Any) -> list[list[int]]:
    mask = batch.mask()
    return [batch.data["ids"][row][mask[row]].tolist() for row in range(len(batch.sizes))]
