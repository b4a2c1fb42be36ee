"""The comparison end to end, with a made-up cost table instead of a measured one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servax.bucketing import Ladder
from servax.experiments.compare_schemes import main
from servax.experiments.contenders import contenders, one_row_waste
from servax.experiments.cost_table import CostTable, LinearCost, default_buckets
from servax.experiments.reporting import machine, write_json
from servax.experiments.traces import Trace, load_trace


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("compare")
    cost, wanted = LinearCost(1e-3, 5e-5), default_buckets()
    table = CostTable({one: cost(one) for one in wanted}, dict.fromkeys(wanted, 0.5), machine())
    write_json(folder / "costs.json", table.to_dict())
    main(
        [
            *("--traces", "azure_llm_2023_conv", "texts", "--requests", "150", "--quick"),
            *("--costs", str(folder / "costs.json")),
            *("--json", str(folder / "result.json"), "--figures", str(folder / "figures")),
        ]
    )
    return json.loads((folder / "result.json").read_text()), folder


def test_the_claims_hold(result: tuple[dict[str, Any], Path]) -> None:
    claims = result[0]["claims"]
    assert len(claims) == 3
    assert all(one["holds"] for one in claims), claims


def test_rows_name_trace_scheme_programs_split_and_waste(result: tuple[dict[str, Any], Path]) -> None:
    rows = result[0]["rows"]
    for row in rows:
        assert {"trace", "scheme", "programs", "split", "waste", "compile_s"} <= set(row)
        assert row["split"] in ("fit", "test")
        assert 0 <= row["waste"] < 1
    assert {row["scheme"] for row in rows} == {
        "exact", "single", "linear", "powers_of_two", "geometric", "bounded_waste", "fitted", "packing",
    }  # fmt: skip
    simulated = [row for row in rows if "p50_ms" in row]
    assert all(
        row["split"] == "test" and row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"] for row in simulated
    )
    assert {row["cost_source"] for row in simulated} == {"measured", "linear prior"}
    exact = next(row for row in simulated if row["scheme"] == "exact")
    assert exact["programs"] == len(np.unique(load_trace(exact["trace"]).halves()[1].lengths))


def test_on_the_half_it_saw_a_fit_is_never_worse_than_any_rule(result: tuple[dict[str, Any], Path]) -> None:
    rows = [row for row in result[0]["rows"] if row["split"] == "fit"]
    best = {(row["trace"], row["programs"]): row["waste"] for row in rows if row["scheme"] == "fitted"}
    for row in rows:
        fitted = best.get((row["trace"], row["programs"]))
        if fitted is not None and row["scheme"] not in ("packing", "exact"):
            assert fitted <= row["waste"] + 1e-12


def test_all_figures_are_drawn(result: tuple[dict[str, Any], Path]) -> None:
    drawn = {path.name: path.stat().st_size for path in (result[1] / "figures").iterdir()}
    assert set(drawn) == {"waste.png", "ladder.png", "latency.png", "use.png"}
    assert min(drawn.values()) > 20_000


def test_one_row_waste_against_counting() -> None:
    trace = Trace("t", np.array([1, 3, 4, 9, 16]), 16)
    by_name = {one.name: one for one in contenders(trace)}
    assert one_row_waste(by_name["single"], trace) == pytest.approx(1 - 33 / 80)
    assert one_row_waste(by_name["powers_of_two"], trace) == pytest.approx(1 - 33 / (1 + 4 + 4 + 16 + 16))
    assert one_row_waste(by_name["exact"], trace) == 0
    # The oldest, 1, with 9 and 4; then 3, beside which nothing fits; then 16.
    assert one_row_waste(by_name["packing:single"], trace) == pytest.approx(1 - 33 / 48)
    assert by_name["fitted:5"].ladder == Ladder((1, 3, 4, 9, 16))


def test_wrong_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--load", "0"], ["--traces", "nope"], ["--requests", "1"]):
        with pytest.raises(SystemExit) as stopped:
            main(wrong)
        assert stopped.value.code == 2
    assert "invalid choice: 'nope'" in capsys.readouterr().err
