"""The programs in benchmarks/ run, and what they print becomes pages; what they measure is for a quiet machine."""

import json
import re
import runpy
import subprocess
import sys
import warnings
from importlib import import_module

import numpy as np
import pytest
import torch
from helpers import ROOT, clean_env, launcher

import fedmpi
from fedmpi.config import sweep

SIDES = r"[^:]*: .* [\d.]+ \S+  .* [\d.]+ \S+  ratio [\d.]+"  # measure.line
TINY = {  # program: (arguments, what it prints)
    "small.py": (["--rounds", "2"], r"logistic .* ratio [\d.]+ .*fast\nmlp .* ratio [\d.]+ .*fast\n"),
    "cnn.py": (
        ["--threads", "1", "--samples", "5", "--test", "20", "--rounds", "1", "--blocks", "1"],
        r"1 rank\(s\), fp32: fedmpi .* s a round .*, by hand .*ratio [\d.]+ .*\n",
    ),
    "cnn.py --apart": (
        ["--apart", "2", "--threads", "2", "--samples", "5", "--test", "20", "--rounds", "1", "--blocks", "1"],
        r"2 loops by hand: apart .* s a round .*, by hand .*ratio [\d.]+ .*\n",
    ),
    "vectors.py": (["--d", "1000", "--repeats", "2"], r"1 rank\(s\), 1,000 parameters.*\nserver, m=12.*\n"),
    "methods.py": (["fedavg", "--rounds", "1"], r"method .*\nfedavg .*\n"),
    "methods.py --passes": (["fedsam", "--passes", "--samples", "10"], r"method .*\nfedsam +2.00 .*perturbs.*\n"),
    "startup.py": (
        ["--repeats", "1", "--ranks", "1"],
        r"to the first step\n(.* s *\n)(.* x\n)+to the end\n(.* s *\n)(.* x\n)+",
    ),
    "sweep.py": (
        ["--runs", "2", "--parts", "1", "--rounds", "1"],
        rf"runs of the quickstart, wall{SIDES}.*same hashes.*\nruns of the quickstart, processor{SIDES}.*\n",
    ),
    "checkpoint.py": (["--pairs", "1", "--samples", "20"], r"fedavg: 1 rounds with, 1 without.*\n.*ratio [\d.]+\n"),
    "rules.py": (
        ["krum", "median", "--m", "3", "900", "--d", "2000", "--gib", "0.001", "--repeats", "1"],
        rf"mean, m=3{SIDES}\nkrum, m=3{SIDES}.*\nmedian, m=3{SIDES}.*\nm=900, d=2,000 left out.*\n",
    ),
    "collectives.py": (
        ["--ranks", "2", "--d", "1000", "--repeats", "2", "--backend", "mpi"],
        "".join(rf"{what}, mpi, 2 ranks{SIDES}.*\n" for what in ("broadcast", "gather of rows")),
    ),
    "scaling.py": (
        ["--ranks", "2", "--rounds", "1", "--train", "0.0001"],
        rf"strong, . ranks, 48 clients{SIDES}\nweak, . ranks, 3 clients{SIDES}\n"
        rf"((strong|weak), 2 ranks, .*{SIDES}\n){{4}}no fit: 4 points for 6.*\n",
    ),
    "states.py": (
        ["--clients", "40", "--cohort", "10", "--rounds", "2", "--cap", "0.0001"],
        rf"(40 stateful clients, 10 a round{SIDES}\n){{2}}(40 stateful.*, memory{SIDES}\n){{2}}",
    ),
    "exchange.py": (
        ["--ranks", "2", "--gib", "0.001", "--rounds", "1", "--backend", "gloo", "--placement", "sharded"],
        rf"(exchange of 0.001 GiB, 6 clients, 2 ranks, gloo, sharded.*{SIDES}\n){{4}}",
    ),
    "augment.py": (
        ["--pictures", "60", "--workers", "0", "--repeats", "1"],
        rf"(augmented epoch, wall, {SIDES}.*\n){{4}}(augmented epoch, processor, {SIDES}.*\n){{4}}",
    ),
    "gpu/rounds.py": (
        ["--device", "cpu", "--share", "100", "--rounds", "1"],
        rf"cnn, .*{SIDES}.*\ncifar10, .*\npacked, .*\n",
    ),
}


@pytest.fixture
def from_benchmarks(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), str(ROOT / "benchmarks"), *sys.path])


@pytest.mark.parametrize("program", TINY)
def test_it_runs(from_benchmarks, monkeypatch, capsys, program):
    words, said = TINY[program]
    file = program.split()[0]
    monkeypatch.setattr(sys, "argv", [file, *words])
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(ROOT / "benchmarks" / file), run_name="__main__")
    torch.set_num_threads(threads)
    assert re.fullmatch(said, capsys.readouterr().out)


def test_vectors_over_ranks():
    program = [sys.executable, str(ROOT / "benchmarks" / "vectors.py"), "--d", "1000", "--repeats", "2"]
    done = subprocess.run(
        [*launcher("mpirun", 3), *program], env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "3 rank(s), 1,000 parameters" in done.stdout


def test_the_cnn_over_ranks_says_who_waits():
    words = ["--threads", "1", "--samples", "5", "--test", "20", "--rounds", "2", "--blocks", "1"]
    program = [sys.executable, str(ROOT / "benchmarks" / "cnn.py"), *words]
    done = subprocess.run(
        [*launcher("mpirun", 3), *program], env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = (
        r"waiting: the rank that waits least [\d.]+ % of a round \(median\); rank 0 [\d.]+ %, rank 1 .*, rank 2 .* %\n"
    )
    assert re.search(said, done.stdout)


def test_every_program_of_the_suite_is_there_and_tried(from_benchmarks):
    suite = import_module("suite")
    named = {file.name for part in suite.PARTS.values() for file in (suite.split(c)[1] for c in part.commands)}
    optional = {"peers.py"}  # which needs other programs
    assert named - optional <= set(TINY)


@pytest.mark.parametrize(
    ("text", "what", "ours", "ratio", "note"),
    [
        ("a, b=1: fedmpi 1.200 s  by hand 1.000 s  ratio 1.20", "a, b=1", ("fedmpi", 1.2), 1.2, ""),
        ("mlp    9 values   fedmpi 2.5 ms   by hand 2 ms   ratio 1.25", "mlp, 9 values", ("fedmpi", 2.5), 1.25, ""),
        (
            "x: a cap of 1 GiB 2,000.5 MiB  free 4 MiB  ratio 500.12  (so)",
            "x",
            ("a cap of 1 GiB", 2000.5),
            500.12,
            "so",
        ),
        ("c=True  fedmpi 1 s  bare 1 s  ratio 1.0  (pairs 1 to 2)", "c=True", ("fedmpi", 1.0), 1, "pairs 1 to 2"),
    ],
)
def test_lines_are_read(from_benchmarks, text, what, ours, ratio, note):
    found = import_module("measure").read(text)
    assert (found["what"], found["ours"], found["ratio"], found["note"]) == (what, ours, ratio, note)


def test_lines_of_other_words_are_read(from_benchmarks):
    rows = import_module("measure").rows
    told = "mlp   199,210 parameters   by hand 1.5 ms   one by one 1.8 ms, ratio 1.20   packed 0.6 ms, 3 times as fast"
    assert [(row["what"], row["ours"][1], row["theirs"][1], round(row["ratio"], 2)) for row in rows(told)] == [
        ("mlp, a client", 1.8, 1.5, 1.2),
        ("mlp, packed", 0.6, 1.8, 0.33),
    ]
    assert rows("nothing of the kind") == []


def test_other_lines_are_no_rows(from_benchmarks, capsys):
    measure = import_module("measure")
    assert measure.read("costs in ms: 1.2 a round, 3 a client") is None
    measure.line("of 3", ("fedmpi", 2.0), ("by hand", 4.0), note="twice as fast")
    assert measure.read(capsys.readouterr().out)["ratio"] == 0.5


def test_costs_are_found_again(from_benchmarks):
    """Times made of known costs give these costs back, and predict what was left out."""
    scaling = import_module("scaling")
    costs, points = (0.003, 0.4, 0.0005, 0.0002, 0.7, 0.001), []
    for ranks in (2, 3, 4, 8, 16):
        for d in scaling.D:
            for clients in (48, 3 * (ranks - 1)):
                point = {"kind": "strong", "ranks": ranks, "clients": clients, "d": d, "training": 0.1, "pause": 0.02}
                beside = sum(c * t for c, t in zip(costs, scaling.terms(point), strict=True))
                points.append(point | {"seconds": 0.1 + beside})
    assert scaling.fit(points) == pytest.approx(costs, rel=1e-6)
    assert max(scaling.errors(points)) < 1e-6


def test_the_suite_keeps_what_is_printed(from_benchmarks, monkeypatch, tmp_path, capfd):
    """A part that fails is said, keeps what was there, and does not keep the others from running."""
    suite, page = import_module("suite"), import_module("make_performance")
    scaled = [f"weak, {n} ranks, 3 clients, d=10: fedmpi {n}.0 s  training alone 1.0 s  ratio 1" for n in (2, 4)]
    scaled.append("weak, 64 ranks, 3 clients, d=10: fit 9.0 s  training alone 1.0 s  ratio 9  (extrapolated)")
    program = tmp_path / "says.py"
    program.write_text("import sys; print('\\n'.join(sys.argv[1:]))")
    bad = tmp_path / "fails.py"
    bad.write_text("raise SystemExit('no')")
    row = "one, two: fedmpi 1.0 s  by hand 2.0 s  ratio 0.50"
    parts = {
        "exchange": suite.Part("one thing", f"{program} '{row}' 'and so on'"),
        "small": suite.Part("another", str(bad)),
        "scaling": suite.Part("a third", f"{program} {' '.join(repr(text) for text in scaled)}"),
    }
    for module in (suite, page):
        monkeypatch.setattr(module, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["suite.py", "--results", str(tmp_path / "results")])
    with pytest.raises(SystemExit, match="failed: small"):
        suite.main()
    kept = json.loads((tmp_path / "results" / "exchange.json").read_text())
    assert kept["commands"][0]["lines"] == [row, "and so on"]
    assert {"processor", "torch", "date", "commit", "load_before"} <= set(kept["machine"])
    assert not (tmp_path / "results" / "small.json").exists()

    capfd.readouterr()
    words = ["--results", str(tmp_path / "results"), "--figures", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["make_performance.py", *words])
    page.main()
    said = capfd.readouterr().out
    assert "| one, two | fedmpi 1 s | by hand 2 s | 0.50 |  |" in said
    assert "and so on" in said
    assert "Not measured yet: `python benchmarks/suite.py small`." in said
    assert all((tmp_path / f"performance_{name}.png").stat().st_size > 5000 for name in ("ratios", "scaling"))


def test_the_page_is_what_was_measured():
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "docs/make_performance.py", "--no-figures"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert (ROOT / "docs/performance.md").read_text() == made.stdout, (
        "run: python docs/make_performance.py > docs/performance.md"
    )


def test_the_gpu_page_has_room_for_its_table(from_benchmarks, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks" / "gpu"), *sys.path])
    kit = import_module("kit")
    parts = [
        {"part": "tests", "code": 0, "lines": ["3 passed, 2 skipped"]},
        {"part": "W2", "code": 0, "lines": ["v: fedmpi 1.0 s  by hand 2.0 s  ratio 0.50  (peak 3 MiB)"]},
        {"part": "W1", "code": 1, "lines": ["RuntimeError: no"]},
    ]
    table = kit.table({"command": "make gpu", "seconds": 9, "machine": {"gpu": "a card", "cuda": None}, "parts": parts})
    page = kit.fill(kit.PAGE.read_text(), table)
    assert "| tests | 3 passed, 2 skipped |" in page
    assert "| W2 | v | 1 s | 2 s | 0.5 | peak 3 MiB |" in page
    assert "| W1 | FAILED: RuntimeError: no |" in page
    assert "gpu a card." in page
    assert kit.fill(page, table) == page


def test_what_a_part_of_the_gpus_kit_said_before_its_time_was_over(from_benchmarks, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks" / "gpu"), *sys.path])
    code, text, _ = import_module("kit").run(["-c", "import time; print('one\\ntwo', flush=True); time.sleep(60)"], 3)
    assert (code, text.split("\n")) == (124, ["one", "two", "", "not done after 3 s"])


def test_a_line_for_each_run_of_a_sweep(from_benchmarks, monkeypatch, capsys, tmp_path):
    """What stands in summary.json and in analysis.jsonl, by label."""
    (tmp_path / "s.yaml").write_text(
        f"name: s\noutput: {tmp_path}\nrounds: 1\nanalysis: [losses]\nover: {{train.lr: [0.1, 0.2], seed: [0, 1]}}\n"
        "data: {source: digits, partition: {scheme: iid, clients: 3}}\n"
        "model: {name: logistic}\nmethod: {name: fedavg}\n"
    )
    asked = sweep.load(tmp_path / "s.yaml", ["only={seed: 0}"])
    for _, settings in asked.runs():
        fedmpi.run(settings)
    words = ["rows.py", str(tmp_path / "s.yaml"), "--figures", "accuracy", "losses.total"]
    monkeypatch.setattr(sys, "argv", words)
    capsys.readouterr()
    runpy.run_path(str(ROOT / "benchmarks" / "rows.py"), run_name="__main__")
    head, *rows = (line.split(",") for line in capsys.readouterr().out.splitlines())
    assert head == ["train.lr", "seed", "accuracy", "losses.total", "sha256"]
    assert [row[:2] for row in rows] == [["0.1", "0"], ["0.2", "0"]]  # seed 1 was not run
    for row, (_, settings) in zip(rows, asked.runs(), strict=True):
        place = settings.output / settings.name
        last, line = (json.loads((place / f"{name}.jsonl").read_text()) for name in ("metrics", "analysis"))
        assert float(row[2]) == pytest.approx(last["accuracy"], rel=1e-5)
        assert float(row[3]) == pytest.approx(line["losses"]["total"], rel=1e-5)
        assert last["sha256"].startswith(row[4])


def test_a_balanced_set(from_benchmarks, monkeypatch, tmp_path):
    """As many of either class, of both parts for training; the test part as it was."""
    y = {"train": [1, 1, 0, 1, 1], "val": [0, 1], "test": [1, 1, 0]}
    parts = {f"{part}_labels": np.array(labels)[:, None] for part, labels in y.items()}
    parts |= {f"{part}_images": np.arange(len(labels)) + 10 * i for i, (part, labels) in enumerate(y.items())}
    np.savez(tmp_path / "a.npz", **parts)
    monkeypatch.setattr(sys, "argv", ["balanced.py", str(tmp_path / "a.npz"), str(tmp_path / "b.npz")])
    runpy.run_path(str(ROOT / "benchmarks" / "balanced.py"), run_name="__main__")
    with np.load(tmp_path / "b.npz") as z:
        assert z["x_train"].tolist() == [0, 1, 2, 10]
        assert z["y_train"].tolist() == [1, 1, 0, 0]
        assert (z["x_test"].tolist(), z["y_test"].tolist()) == ([20, 21, 22], [1, 1, 0])


def test_principal_directions_of_updates(from_benchmarks):
    """Two clients that disagree along e_1 and share a tenth along e_2; then against the matrix itself."""
    directions = import_module("directions").directions
    rng = np.random.default_rng(0)
    for G in (np.array([[1.0, 0.1], [-1.0, 0.1]]), rng.normal(size=(4, 9))):
        norms = np.linalg.norm(G, axis=1)
        lam, mean, signs = directions(norms, G @ G.T / np.outer(norms, norms))
        values, v = np.linalg.eigh(G.T @ G / len(G))
        values, v = values[::-1][: len(G)], v[:, ::-1][:, : len(G)]
        assert lam == pytest.approx(values / values.sum())
        along = G.mean(0) @ v
        assert mean == pytest.approx(along**2 / (along**2).sum(), abs=1e-12)
        assert abs(signs @ np.sign(G @ v[:, 0])) == len(G)
    assert directions(np.array([1.005**0.5] * 2), np.array([[1, -0.98], [-0.98, 1]]))[1] == pytest.approx([0, 1])


PARTS_OF = {"niid_bench"}


def test_the_page_of_reproduced_cells_is_made_from_the_verdicts():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "docs/make_reproduction.py", "--no-figure"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == (ROOT / "docs" / "reproduced.md").read_text(encoding="utf-8"), (
        "run: python docs/make_reproduction.py > docs/reproduced.md"
    )
    counted = re.search(r"All tables: (\d+) cells: (\d+) within the .* spread, (\d+) within two, (\d+)", done.stdout)
    assert counted, done.stdout
    every, *parts = map(int, counted.groups())
    assert sum(parts) == every
    assert f"{every} published cells" in (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    for path in (ROOT / "benchmarks" / "results" / "reproduction").glob("*.json"):
        found = json.loads(path.read_text())
        made = sweep.load(ROOT / "configs" / "benchmarks" / f"{path.stem}.yaml")
        asked = sweep.load(made.path, [text for text in found["overrides"] if text.startswith("only=")])
        names = {asked.name(labels) for labels in asked.labels}
        published = [figures[0] for each in made.published for figures in each.values.values()]
        if path.stem in PARTS_OF:  # a table that is being trained
            assert found["sha256_of_models"].keys() < {made.name(labels) for labels in made.labels}
            assert found["sha256_of_models"].keys() <= names
            (theirs,) = made.published
            for cell in found["cells"]:
                assert cell["published"] == theirs.values[tuple(cell["labels"][axis] for axis in theirs.axes)][0]
            assert sum(cell["seeds"] for cell in found["cells"]) == len(found["sha256_of_models"])
        else:
            assert found["sha256_of_models"].keys() == names
            assert [cell["published"] for cell in found["cells"]] == published
