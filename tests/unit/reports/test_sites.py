"""A page for each site, and the model card: what they say, against the files by hand; and what they refuse."""

import hashlib
import html
import json
import os
import re

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from fedmpi import config
from fedmpi.common.errors import UserError
from fedmpi.reports import site_pages
from fedmpi.reports.run_groups import Run
from fedmpi.reports.sites import compare_with_baseline, list_sites, read_baseline

SITES = ["north", "<img src=x onerror=alert(1)>", "south"]
SIZES = [60, 30, 10]
COHORTS = [[0, 1, 2], [0, 1], [0, 2]]
CONFIG = {
    "rounds": 3,
    "data": {"source": "heart_disease", "silos": SITES, "root": "x"},
    "model": {"name": "logistic"},
    "train": {"lr": 0.1},
    "evaluate": {"protocol": ["global", "personal"]},
}


def made(path, method="fedavg", accuracy=(80.0, 70.0, 60.0), **changes):
    """A run of three sites, three rounds; in the last one the upload of site 2 did not count."""
    path.mkdir(parents=True)
    tree = {**CONFIG, "name": path.name, "output": str(path.parent), "method": {"name": method}, **changes}
    settings = config.schema.Settings.model_validate(tree)
    (path / "config.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    rows = [{"round": t, "cohort": members, "refused": [], "sha256": f"{t:064}"} for t, members in enumerate(COHORTS)]
    rows[2]["refused"] = [{"client": 2, "norm": None, "bound": 1.0}]
    write_lines(path / "metrics.jsonl", rows)
    lines = [
        {"round": t, "client": k, "site": SITES[k], "protocol": p, "samples": 40, "accuracy": a - 2 + t, "loss": 1 / a}
        for t in range(3)
        for k, a in enumerate(accuracy)
        for p in ("global", "personal")
    ]
    write_lines(path / "clients.jsonl", lines)
    updates = [{"round": t, "clients": m, "norms": [k + 1.0 for k in m], "direction": 1} for t, m in enumerate(COHORTS)]
    write_lines(path / "update_stats.jsonl", updates)
    (path / "partition.json").write_text(json.dumps({"sizes": SIZES, "label_counts": [[30, 30], [30, 0], [3, 7]]}))
    ranks = [{"rank": rank} for rank in range(4)]
    (path / "environment.json").write_text(json.dumps({"ranks": ranks, "packages": {"fedmpi": "1"}}))
    (path / "summary.json").write_text(json.dumps({"exit_reason": "finished"}))
    save_file({"w": np.zeros((2, 13), np.float32), "b": np.zeros(2, np.float32)}, path / "model.safetensors")
    (path / "audit").mkdir()
    for k in (0, 1):  # that of site 2 lies elsewhere
        said = [{"time": "T", "round": None, "what": ["label counts"], "to": 0, "bytes": 16, "sha256": "00"}]
        for t in (t for t, members in enumerate(COHORTS) if k in members):
            what = ["_loss", "_seconds", "_flag", "_b", "dw"]
            said.append({"time": "T", "round": t, "what": what, "to": 0, "bytes": 100 + k, "sha256": f"{k}{t}" * 32})
        write_lines(path / "audit" / f"rank-{k + 1}.jsonl", said)
    return path


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def text_of(page):
    """What a reader of the page sees, cells of tables parted by bars."""
    body = re.sub(r"<(svg|script|style).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", body.replace("</td>", " | "))).split())


def page_of(run, client, baseline=None):
    everybody = list_sites(run)
    return text_of(site_pages.render_site_page(everybody[client], everybody, baseline))


def card_of(run, baseline=None, statements=()):
    return text_of(site_pages.render_model_card(list_sites(run), baseline, dict(statements)))


# ---- what a site gave ----
def test_a_sites_page_names_no_other(tmp_path):
    run = Run(made(tmp_path / "r"))
    said = page_of(run, 0)
    assert "60 of 100" in said
    assert "3 of 3" in said
    assert not any(name in said for name in SITES[1:])
    lengths = site_pages.plot_update_norms(list_sites(run)[0])
    # of one other site none: it would be its own
    assert lengths.data == [[0, 1.0, 2.5], [1, 1.0, None], [2, 1.0, None]]


# ---- what it gained ----
@pytest.mark.parametrize(
    ("together", "alone", "said"),
    [
        (80.0, 80.0, "the same"),
        (80.0, 70.0, "too close to tell"),  # error sqrt(.8 .2 / 40 + .7 .3 / 40) = 0.0962; twice that is 19.2 points
        (80.0, 61.0, "too close to tell"),  # 19 of 19.95
        (80.0, 59.0, "better together"),
        (50.0, 80.0, "better alone"),
    ],
)
def test_verdicts(tmp_path, together, alone, said):
    run, other = Run(made(tmp_path / "r", accuracy=[together] * 3)), made(tmp_path / "a", "local", [alone] * 3)
    lower = "the same" if together == alone else "better together" if 1 / together < 1 / alone else "better alone"
    assert [row[-1] for row in compare_with_baseline(list_sites(run)[0], read_baseline(run, other))] == [said, lower]


def test_a_baseline_differs_in_nothing_but_the_method(tmp_path):
    run = Run(made(tmp_path / "runs" / "r"))
    fair = made(tmp_path / "runs" / "fair", "local", data={**CONFIG["data"], "root": "elsewhere"})
    assert read_baseline(run, fair).differing_settings == []
    faster = made(tmp_path / "runs" / "faster", "local", train={"lr": 0.5})
    assert read_baseline(run, faster).differing_settings == ["train.lr"]
    in_turn = made(tmp_path / "runs" / "in_turn", "local", cohort={"sampling": "cyclic"})
    assert read_baseline(run, in_turn).differing_settings == ["cohort.sampling"]
    (cut := made(tmp_path / "runs" / "cut", "local")).joinpath("summary.json").unlink()
    assert "how they ended" in read_baseline(run, cut).differing_settings[0]
    assert "train.lr differ" in page_of(run, 0, read_baseline(run, faster))
    with pytest.raises(UserError, match=r"is a run of method fedavg at north, .*; method.name=local at the sites"):
        read_baseline(run, run.path)


# ---- what left it ----
def test_what_left_a_site_is_that_of_its_record(tmp_path):
    run = Run(made(tmp_path / "r"))
    path, said = run.path / "audit" / "rank-2.jsonl", page_of(run, 1)
    assert "3 messages left" in said
    assert hashlib.sha256(path.read_bytes()).hexdigest() in said
    updates = "its mean training loss; batch statistics of the model; the change of the model's weights"
    assert f"how many samples it has of each class | 1 | 16 | server | {updates} | 2 | 202 | server |" in said
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert "lacks 1 of the 2 rounds" in page_of(run, 1)
    assert "audit/rank-3.jsonl" in page_of(run, 2)


# ---- the card ----
def test_the_card_says_what_a_board_asks(tmp_path):
    run = Run(made(tmp_path / "r"))
    other = read_baseline(run, made(tmp_path / "a", "local", (80.0, 99.0, 60.0)))
    said = card_of(run, other, {"intended use": "a second opinion"})
    assert "logistic, 28 weights" in said
    assert "serves south worst, with accuracy (%) 60" in said
    assert "intended use | a second opinion" in said
    missing = re.search(r"Not stated, [^.]*", said)[0]
    assert "Approval and consent" in missing
    assert "Intended use" not in missing
    assert hashlib.sha256((run.path / "model.safetensors").read_bytes()).hexdigest() in said


def test_the_card_names_the_limits_of_the_run(tmp_path):
    said = card_of(Run(made(tmp_path / "r")))
    assert "south has few test samples (40, one is 2.5 %)" in said
    assert f"The training samples of {SITES[1]} are of one class alone" in said
    assert "More than half of the weight was north's" in said
    assert "Uploads of south did not count in 1 rounds" in said
    assert "No run in which sites train alone" in said


def test_few_test_samples_are_shown_without_a_verdict(tmp_path):
    run = Run(with_samples(made(tmp_path / "r"), {2: 19}))
    alone = read_baseline(run, made(tmp_path / "a", "local", (80.0, 99.0, 10.0)))
    assert "60 together, 10 alone: too few test samples (19) for a verdict" in page_of(run, 2, alone)
    said = card_of(run, alone)
    assert f"serves {SITES[1]} worst, with accuracy (%) 70" in said
    assert "Too few test samples, below 20, to compare with other sites: south (19)" in said
    assert " worst" not in card_of(Run(with_samples(run.path, {1: 19, 2: 19})), alone)


def with_samples(path, samples):
    """The run with these numbers of test samples, by client."""
    rows = [json.loads(line) for line in (path / "clients.jsonl").read_text().splitlines()]
    write_lines(
        path / "clients.jsonl", [{**row, "samples": samples.get(row["client"], row["samples"])} for row in rows]
    )
    return path


def test_targets_that_are_no_classes_have_no_counts(tmp_path):
    path = made(tmp_path / "r", task={"name": "survival"})
    (path / "partition.json").write_text(json.dumps({"sizes": SIZES, "label_counts": [[0]] * 3}))
    run = Run(path)
    assert site_pages.build_samples_table(list_sites(run)).head == ("site", "training samples", "test samples")
    assert "which class" not in card_of(run)
    said = page_of(run, 1)
    assert "zeros in place of label counts" in said
    assert "how many samples it has" not in said


def test_a_loss_that_a_site_does_not_have_is_a_dash(tmp_path):
    path = made(tmp_path / "r")
    rows = [json.loads(line) for line in (path / "clients.jsonl").read_text().splitlines()]
    write_lines(path / "clients.jsonl", [{**row, "loss": None} if row["client"] == 1 else row for row in rows])
    run = Run(path)
    alone = read_baseline(run, made(tmp_path / "a", "local"))
    assert compare_with_baseline(list_sites(run)[1], alone)[-1] == ["loss", None, 1 / 70, "-"]
    site_pages.write_site_pages(path, None, None, print)  # curves without a point, too


# ---- the files ----
def test_pages_are_whole_escaped_and_need_nothing_else(tmp_path):
    path, said = made(tmp_path / "runs" / "r"), []
    alone = made(tmp_path / "runs" / "alone", "local")
    (tmp_path / "about.yaml").write_text("Contact: <script>alert(1)</script>\n")
    site_pages.write_site_pages(path, alone, tmp_path / "about.yaml", said.append)
    assert sorted(os.listdir(path / "sites")) == [
        "img-src-x-onerror-alert-1.html",
        "model-card.html",
        "north.html",
        "south.html",
    ]
    for page in (path / "sites").iterdir():
        content = page.read_text()
        assert "<img" not in content
        assert "<script>alert" not in content
        assert not re.search(r"""(src|href)=["'](?!#|data:)""", content)
        assert content.count("<h1>") == 1
    assert "alone" in said[0]
    assert str(tmp_path) not in (path / "sites" / "north.html").read_text()  # nobody's folders
