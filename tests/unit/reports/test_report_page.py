"""The report of a run: valid, self-contained HTML with the numbers of the run's files, even if these are damaged."""

import base64
import csv
import hashlib
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from helpers import ROOT, clean_env, fedmpi

from fedmpi.analysis import charts
from fedmpi.reports import report, timeline
from fedmpi.reports.page import Figure
from fedmpi.reports.run_groups import read_runs

ROUNDS, CLIENTS, RANKS = 200, 100, 12
NASTY = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"
EMPTY = {"meta", "br", "link"}


class Page(HTMLParser):
    """Parses a page into tags, ids, links and texts, and checks that tags are closed."""

    def __init__(self, content):
        super().__init__()
        self.open, self.ids, self.links, self.tags, self.texts = [], [], [], [], []
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("href", "src", "xlink:href", "action", "data")]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def csv(self, name):
        """Return the rows of the CSV data of a figure."""
        (href,) = [a["href"] for tag, a in self.tags if tag == "a" and a.get("download") == f"{name}.csv"]
        text = base64.b64decode(href.removeprefix("data:text/csv;base64,")).decode()
        return list(csv.DictReader(io.StringIO(text)))


def parse_offline_page(content):
    page = Page(content)
    assert len(set(page.ids)) == len(page.ids)
    assert all(link.startswith(("#", "data:text/csv;base64,")) for link in page.links)
    assert {link[1:] for link in page.links if link[0] == "#"} <= set(page.ids)
    elsewhere = set(re.findall(r"(?:https?:)?//[\w.]+", re.sub(r"base64,[\w+/=]*|sha256-[\w+/=]*", "", content)))
    assert elsewhere <= {"http://www.w3.org"}  # the name of SVG
    assert "url(" not in content
    assert "@import" not in content
    assert len(content) < 3_000_000
    return page


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(metrics_row) + "\n" for metrics_row in rows))


def metrics_row(t, **more):
    figures = {"loss": 2 / (t + 1), "accuracy": 90 - 80 / (t + 1), "class_accuracy": [90 - t % 7, None, 50.5]}
    time = {"wall_s": 0.5, "train_s": 0.3, "wait_s": 0.1, "server_s": 0.05}
    sent = {"up_parameters": 1000, "down_parameters": 1000, "sent_bytes": 4000, "received_bytes": 5000}
    own = {"sharpness": 0.1 * t}  # of the method
    last = {"sha256": f"{t:064x}", "personal_accuracy": 80.25, "evaluate_s": 0.01}
    return {"round": t, **figures, "cohort": [0], "refused": [], **time, **own, **sent, **last, **more}


def write_run(path, rounds=ROUNDS, clients=CLIENTS, ranks=RANKS):
    """Write a run directory with the files that fedmpi writes."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(f"name: {path.name}\nseed: 0\nrounds: {rounds}\nmethod: {{name: fedavg}}\n")
    write_rows(path / "metrics.jsonl", map(metrics_row, range(rounds)))
    client_rows = [
        {"round": t, "client": k, "protocol": "personal", "samples": 9, "loss": 1.0, "accuracy": 50 + k % 40 + t / 100}
        for t in range(rounds)
        for k in range(clients)
    ]
    write_rows(path / "clients.jsonl", client_rows)
    counts = [[k + c for c in range(10)] for k in range(clients)]
    facts = {"scheme": "dirichlet", "seed": 0, "clients": clients, "sizes": list(map(sum, counts))}
    (path / "partition.json").write_text(json.dumps({**facts, "label_counts": counts}))
    (path / "summary.json").write_text(json.dumps({"exit_reason": "finished", "rounds": rounds}))
    (path / "environment.json").write_text(json.dumps({"command": "fedmpi run", "ranks": [{"rank": 0, "host": "h"}]}))
    for rank in range(ranks):
        each = [["wait_command", 0.0, 10.0], *(["train", 10.0 + 20 * i, 20.0, i] for i in range(clients // ranks + 1))]
        each += [["uploads", 200.0, 5.0]]
        spans = [{"round": t, "at": 1e9 + t * 0.3, "s": 0.25, "spans": each} for t in range(rounds)]
        head = {"job": 1.0, "rank": rank, "of": ranks, "host": "h"}
        write_rows(path / "trace" / f"rank-{rank:04}.jsonl", [head, *spans])
    return path


def render(*paths):
    runs = read_runs(paths)
    return report.render_report(runs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a run in one process; without a report, matplotlib is not imported."""
    directory = tmp_path_factory.mktemp("report")
    (directory / "run.yaml").write_text(
        "name: tiny\nrounds: 2\ndata: {source: digits, partition: {scheme: dirichlet, clients: 3, alpha: 0.5}}\n"
        "model: {name: logistic}\nmethod: {name: fedavg}\ntrain: {batch_size: 100, lr: 0.1}\n"
        f"evaluate: {{protocol: [global, personal]}}\noutput: {directory}\n"
    )
    program = "import sys, fedmpi; fedmpi.run('run.yaml', sys.argv[1:]); print('matplotlib' in sys.modules)"
    for overrides, imports_matplotlib in (
        (["name=bare", "report=false"], "False"),
        ([], "True"),
    ):  # importing matplotlib is slow
        command = [sys.executable, "-c", program, *overrides]
        process = subprocess.run(command, cwd=directory, env=clean_env(), capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        assert process.stdout.splitlines()[-1] == imports_matplotlib
    return directory / "tiny"


def test_a_run_writes_a_report_with_the_numbers_of_its_files(trained):
    page = parse_offline_page((trained / "report.html").read_text())
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    for name in ("accuracy", "loss", "train_loss", "personal_accuracy"):
        rows_of_figure = page.csv(f"learning-{name}")
        assert [(int(r["round"]), float(r[name])) for r in rows_of_figure] == [(r["round"], r[name]) for r in rows]
    class_rows = page.csv("classes")
    assert [float(r["accuracy"]) for r in class_rows] == [v for r in rows for v in r["class_accuracy"]]
    client_rows = [json.loads(line) for line in (trained / "clients.jsonl").read_text().splitlines()]
    worst = [min(line["accuracy"] for line in client_rows if line["round"] == t) for t in (0, 1)]
    assert [float(r["worst"]) for r in page.csv("clients-personal-accuracy")] == worst
    partition = json.loads((trained / "partition.json").read_text())
    assert sum(int(r["samples"]) for r in page.csv("partition")) == sum(partition["sizes"])
    sections = [a["id"] for tag, a in page.tags if tag == "section"]
    expected_sections = "summary learning clients updates classes partition traffic time settings environment"
    assert sections == expected_sections.split()
    assert rows[-1]["sha256"] in page.texts


CHARTS = {
    "lines": charts.LineChart(
        [charts.Series("a", [0, 1, 2], [0.5, None, 1.0]), charts.Series("b", [0], [1e9])], "x", "y"
    ),
    "band": charts.LineChart([charts.Series("a", [0, 1], [1 - 2**-53, 1.0], [0.9, 0.9], [1.0, 1.1])], "x", "y"),
    "bars": charts.make_stacked_bar_chart(["one", NASTY], {"p": [1.0, -2.0], "q": [0.0, 3.0]}, "x"),
    "grid": charts.HeatMap(["r"], ["c", "d"], [[-0.5, None]], "row", "column", "u", signed=True, show_numbers=True),
    "image": charts.HeatMap([str(r) for r in range(30)], list("abcdefghijklmnopqrstuvwxyz"), [range(26)] * 30, *"rcu"),
}


@pytest.mark.parametrize("kind", CHARTS)
def test_charts_use_colours_of_the_page_and_are_reproducible(kind, tmp_path):
    drawn = charts.render_svg(CHARTS[kind], "n", NASTY)
    assert drawn == charts.render_svg(CHARTS[kind], "n", NASTY)
    plain = charts.write_chart(CHARTS[kind], tmp_path / "n.svg", NASTY).read_text()
    assert plain == charts.write_chart(CHARTS[kind], tmp_path / "n.svg", NASTY).read_text()
    ElementTree.fromstring(plain)
    assert set(re.findall(r"(?<=: )#\w+", drawn)) == set()  # every colour is a CSS variable of the page
    assert set(re.findall(r"var\(--\w+,(#\w+)\)", drawn)) <= set(re.findall(r"(?<=: )#\w+", plain))


def test_parts_of_stacked_bars_are_adjacent():
    assert CHARTS["bars"].spans == {"p": [(0, 0.0, 1.0), (1, -2.0, 0.0)], "q": [(0, 1.0, 1.0), (1, 0.0, 3.0)]}


def test_the_security_policy_allows_only_the_script_of_the_page(trained):
    content = (trained / "report.html").read_text()
    (policy,) = [a["content"] for tag, a in Page(content).tags if a.get("http-equiv") == "Content-Security-Policy"]
    script = content.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_figures_are_written_as_files(trained, tmp_path):
    done = fedmpi("report", trained, "--to", tmp_path / "page.html", "--figures", tmp_path / "figures")
    assert done.returncode == 0, done.stderr
    names = {path.stem for path in (tmp_path / "figures").iterdir()}
    parts = [part for section in report.build_sections(read_runs([trained])) for part in section.parts]
    assert names == {part.name for part in parts if isinstance(part, Figure)}
    for name in names:
        root = ElementTree.parse(tmp_path / "figures" / f"{name}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in ElementTree.tostring(root, "unicode")  # files have fixed colours
        assert (tmp_path / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / "figures" / f"{name}.csv").read_text().count("\n") > 1
    assert parse_offline_page((tmp_path / "page.html").read_text())


def test_names_and_texts_of_users_are_escaped(tmp_path, monkeypatch):
    save = charts.save_figure
    monkeypatch.setattr(
        charts, "save_figure", lambda *of, **more: of[1].suffix == ".svg" and save(*of, **more)
    )  # writing PNG files is slow
    directory = tmp_path / "<b>run" / "r&r"
    run = write_run(directory, rounds=2, clients=2, ranks=1)
    (run / "config.yaml").write_text(f"name: {json.dumps(NASTY)}\nmethod: {{name: {json.dumps(NASTY)}}}\nseed: 0\n")
    write_rows(
        run / "metrics.jsonl",
        [metrics_row(0, **{NASTY: 1.0, "../../x": 2.0}), metrics_row(1, **{NASTY: 2.0, "../../x": 2.0})],
    )
    client_row = {"round": 0, "client": 0, "site": NASTY, "protocol": NASTY, "samples": 1, NASTY: 1.0}
    write_rows(run / "clients.jsonl", [client_row])
    fault = {"round": 1, "ranks": {"1": NASTY}, "clients": [NASTY], "gone": [], "why": NASTY}
    write_rows(run / "faults.jsonl", [fault])
    (run / "environment.json").write_text(json.dumps({"command": NASTY, "packages": {NASTY: NASTY}, "git": None}))
    head = {"job": 1.0, "rank": 0, "of": 1, "host": NASTY}
    spans = {"round": 0, "at": 1.0, "s": 1.0, "spans": [[NASTY, 0.0, 900.0]]}
    write_rows(run / "trace" / "rank-0000.jsonl", [head, spans])
    content = render(run)
    page = parse_offline_page(content)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not [tag for tag, attrs in page.tags if tag == "img" or any(name.startswith("on") for name in attrs)]
    assert "cannot be shown" not in content
    report.write_report(
        [run], tmp_path / "p.html", tmp_path / "figures", print
    )  # all files of figures are in the directory
    assert {path.parent for kind in ("svg", "csv") for path in tmp_path.rglob(f"*.{kind}")} == {tmp_path / "figures"}
    for path in (tmp_path / "figures").glob("*.svg"):
        ElementTree.parse(path)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ({"summary.json": None}, "not ended (still running, or killed)"),
        ({"metrics.jsonl": None, "clients.jsonl": None}, "run: there is no metrics.jsonl"),
        ({"metrics.jsonl": '{"round": 0, "accuracy": null}\n'}, "No round has a finite metric"),
        (
            {"metrics.jsonl": '{"round": 0, "accuracy": 50.0, "loss": NaN}\n{"rou'},
            "1 incomplete or damaged line ignored",
        ),
        ({"partition.json": '{"sizes": 3, "label_counts": [1]}'}, "This section cannot be shown"),
        ({"partition.json": "[]"}, "partition.json is damaged: it contains no JSON object"),
        ({"config.yaml": "a: [1"}, "not valid YAML"),
        ({"config.yaml": "name: ${env:PATH}"}, "contains references to environment variables"),
        ({"trace/rank-0000.jsonl": '{"job": 1}\n'}, "trace is damaged"),
        ({"summary.json": '{"exit_reason": "failed: rank 2 is dead", "diverged": 1}'}, "failed: rank 2 is dead"),
    ],
)
def test_damaged_files_are_reported_and_other_sections_remain(tmp_path, damage, expected):
    run = write_run(tmp_path / "run", rounds=1, clients=3, ranks=1)
    for name, content in damage.items():
        (run / name).unlink(missing_ok=True)
        if content is not None:
            (run / name).write_text(content)
    page = parse_offline_page(render(run))
    assert any(expected in text for text in page.texts)
    assert "partition" in page.ids or "partition.json" in damage


def test_the_timeline_is_written_as_table_and_figure(tmp_path):
    run, to, printed = write_run(tmp_path / "run", rounds=4, clients=4, ranks=2), tmp_path / "to", []
    timeline.write_timeline(run, 3, to, printed.append)
    assert printed[-3].startswith("Rank 0 is the busiest: it waits 6.0 % of the time")  # 15 of 250 ms
    facts = json.loads((to / "timeline.json").read_text())
    assert facts["ranks"][0]["spans"] == pytest.approx({"train": 0.24, "wait_command": 0.04, "uploads": 0.02})
    _, figure = timeline.plot_timeline(timeline.read_last_job(run), 3)
    assert sum(map(len, figure.chart.spans.values())) == len(figure.data) == 3 * 2 * 5  # rounds, ranks, spans
    assert (to / "timeline.svg").exists()


def test_groups_of_runs_have_means_with_bands(tmp_path):
    for method in ("fedavg", "fedprox"):
        for seed in (0, 1):
            run = write_run(tmp_path / f"{method}-{seed}", rounds=3, clients=4, ranks=1)
            (run / "config.yaml").write_text(f"name: {run.name}\nseed: {seed}\nmethod: {{name: {method}}}\n")
            write_rows(run / "metrics.jsonl", [metrics_row(t, accuracy=10.0 * t + seed) for t in range(3)])
    page = parse_offline_page(render(tmp_path))
    rows = page.csv("learning-accuracy")
    # a group is named after its first run; x and x + 1 have mean x + 1/2 and sample standard deviation 1 / sqrt 2
    assert [(r["settings"], float(r["accuracy"])) for r in rows[:3]] == [
        ("fedavg-0", 0.5),
        ("fedavg-0", 10.5),
        ("fedavg-0", 20.5),
    ]
    assert {round(float(r["std"]), 12) for r in rows} == {round(0.5**0.5, 12)}
    assert {r["runs"] for r in rows} == {"2"}
    assert "20.50 ± 0.71" in page.texts


def test_every_section_is_documented():
    page = (ROOT / "docs" / "report.md").read_text()
    for _, title, _, _ in report.SECTIONS:
        assert f"**{title.partition(':')[0]}**" in page
