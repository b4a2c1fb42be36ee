"""Dynamic against sequential serving: the shape of the result on a device whose runs cost the same."""

from servax.experiments import dynamic_vs_sequential as experiment
from servax.experiments.dynamic_figure import draw_dynamic


def test_batches_gain_where_a_run_costs_the_same_for_any_batch(tmp_path):
    device = experiment.fixed_device(0.01)
    rows = experiment.measure([device], batches=(1, 8), waits_ms=(0.0, 40.0), seconds=0.4)
    modes = [(row["mode"], row["max_batch"]) for row in rows[:3]]
    assert modes == [("sequential", 1), ("dynamic", 1), ("dynamic", 8)]
    assert rows[0]["gain"] == 1
    assert rows[2]["gain"] > 2  # 8 on a quiet machine
    assert rows[2]["rows"] > 4
    by_window = rows[3:]
    assert [row["window_ms"] for row in by_window] == [0.0, 0.0, 40.0, 40.0]
    assert len({row["rate"] for row in by_window}) == 2
    # Most requests find the device idle here: a window fills batches and delays answers.
    assert by_window[2]["rows"] > by_window[0]["rows"] >= 1
    assert all(row["p99_ms"] >= row["p50_ms"] > 0 for row in by_window)
    draw_dynamic(tmp_path / "figure.png", rows)
    assert (tmp_path / "figure.png").stat().st_size > 10_000
