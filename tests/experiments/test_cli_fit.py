"""`servax fit` through its command line."""

import gzip
import json
from pathlib import Path

import pytest
import typer
from servax.bucketing import Ladder, fit_ladder
from servax.server.cli.fit import fit
from typer.testing import CliRunner

app = typer.Typer(add_completion=False)
app.command()(fit)
DATA = Path(__file__).resolve().parents[2] / "experiments" / "data"
CONV = DATA / "azure_llm_2023_conv.csv.gz"


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def test_the_azure_prompts() -> None:
    code, out, _ = run(CONV, "--axis", "prompt_tokens", "--programs", "13", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["requests"] == 19366
    assert found["programs"] == len(found["ladder"]) == 13
    assert found["ladder"][-1] == found["limit"] == 14050
    assert found["waste"] < found["held_out_waste"] < 0.11
    assert found["compile_s"] == 13.0
    assert found["one_more"]["waste"] < found["waste"]
    powers = next(one for one in found["schemes"] if one["scheme"] == "powers_of_two")
    assert powers["held_out"] > 0.28
    assert found["waste"] == min(one["waste"] for one in found["schemes"] if one["programs"] <= 13)


def test_the_table_names_the_ladder_the_bill_and_the_next_program() -> None:
    code, out, err = run(CONV, "--axis", "prompt_tokens", "--programs", "4", "--compile-seconds", "2.5")
    assert (code, err) == (0, "")
    assert "4 programs, one a size, compile in 10.0 s at 2.5 s each" in out
    assert "One more program would bring the waste from" in out
    assert "--scheme explicit:" in out
    assert "held out" in out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "length\n3\n5\n5\n9\n"),
        ("t.csv", "arrival_s,length\n0.5,3\n1,5\n1,5.0\n2,9\n"),
        ("t.csv.gz", "tokens\n3\n5\n5\n9\n"),
        ("t.jsonl", '{"length": 3}\n{"length": 5}\n\n{"length": 5}\n{"length": 9}\n'),
        ("t.jsonl.gz", "3\n5\n5\n9\n"),
    ],
)
def test_every_format(tmp_path: Path, name: str, text: str) -> None:
    code, out, err = run(written(tmp_path, name, text), "--programs", "2", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert Ladder(tuple(found["ladder"])) == fit_ladder([3, 5, 5, 9], 2)
    assert found["held_out_waste"] is None


def test_a_budget_buys_as_many_programs_as_it_pays() -> None:
    options = (CONV, "--axis", "prompt_tokens", "--compile-seconds", "4", "--json")
    assert json.loads(run(*options, "--budget-seconds", "13")[1])["programs"] == 3
    code, _, err = run(*options, "--budget-seconds", "3")
    assert code == 2
    assert "needs one program of 4 s; got a budget of 3 s" in err


def test_more_programs_than_sizes_gives_each_size_its_own(tmp_path: Path) -> None:
    path = written(tmp_path, "t.csv", "length\n7\n7\n9\n")
    found = json.loads(run(path, "--programs", "50", "--json")[1])
    assert found["ladder"] == [7, 9]
    assert found["waste"] == 0
    assert found["one_more"] is None
    assert "One more program would save nothing" in run(path, "--programs", "50")[1]


def test_one_single_size(tmp_path: Path) -> None:
    path = written(tmp_path, "t.csv", "length\n7\n")
    assert json.loads(run(path, "--json")[1])["ladder"] == [7]
    assert json.loads(run(path, "--limit", "12", "--programs", "1", "--json")[1])["ladder"] == [12]


def test_alignment_and_limit(tmp_path: Path) -> None:
    path = written(tmp_path, "t.csv", "length\n" + "\n".join(map(str, range(1, 100))) + "\n")
    found = json.loads(run(path, "--align", "16", "--limit", "120", "--programs", "4", "--json")[1])
    assert found["ladder"][-1] == 120
    assert all(rung % 16 == 0 for rung in found["ladder"][:-1])


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        ("t.csv", "", (), "at least one request"),
        ("t.csv", "length\n", (), "at least one request"),
        ("t.jsonl", "\n", (), "at least one request"),
        ("t.csv", "length\n3\n0\n", (), "line 3 of t.csv has '0'"),
        ("t.csv", "length\nnan\n", (), "line 2 of t.csv has 'nan'"),
        ("t.csv", "length\n-4\n", (), "at least 1"),
        ("t.csv", "length\n2.5\n", (), "a whole number"),
        ("t.csv", "length\nlong\n", (), "line 2 of t.csv has 'long'"),
        ("t.csv", "length,n\n3,1\n,2\n", (), "line 3 of t.csv has ''"),
        ("t.jsonl", '{"length": true}\n', (), "line 1 of t.jsonl has True"),
        ("t.jsonl", '{"length": 3}\n{"size": 3}\n', (), "line 2 of t.jsonl has nothing"),
        ("t.jsonl", '{"length": NaN}\n', (), "line 1 of t.jsonl has nan"),
        ("t.jsonl", "{length: 3}\n", (), "line 1 is not"),
        ("t.csv", "a,b\n3,4\n", (), "which has a, b; got 'length'. Name one with --axis"),
        ("t.csv", "a,b\n3,4\n", ("--axis", "c"), "which has a, b; got 'c'"),
        ("t.csv", "length\n30\n40\n", ("--limit", "35"), "1 of 2 are above it, the largest is 40"),
        ("t.csv", "length\n30\n", ("--programs", "2", "--budget-seconds", "9"), "got both"),
        ("t.csv", "length\n30\n", ("--plot", "figure.txt"), "must end in .png"),
        ("t.txt", "30\n", (), "must end in .csv or .jsonl"),
    ],
)
def test_bad_traces_say_what_to_do(
    tmp_path: Path, name: str, text: str, options: tuple[str, ...], message: str
) -> None:
    code, out, err = run(written(tmp_path, name, text), *options)
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "must be a readable file" in run(tmp_path / "none.csv")[2]
    torn = tmp_path / "t.csv.gz"
    torn.write_bytes(b"length\n3\n")
    assert "gzipped if its name ends in .gz" in run(torn)[2]
    torn.write_bytes(gzip.compress(b"length\n3\n" * 999)[:40])
    assert "gzipped if its name ends in .gz" in run(torn)[2]
    latin = tmp_path / "t.csv"
    latin.write_bytes("länge\n3\n".encode("latin-1"))
    assert "UTF-8" in run(latin)[2]


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    figure = tmp_path / "ladder.png"
    assert run(CONV, "--axis", "prompt_tokens", "--plot", figure)[0] == 0
    assert figure.stat().st_size > 20_000
    code, _, err = run(CONV, "--axis", "prompt_tokens", "--plot", tmp_path / "no" / "ladder.png")
    assert code == 2
    assert "must be writable" in err
