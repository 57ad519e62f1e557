"""The page of each site and the model card: their content against the files of the run, and errors."""

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


def write_run(path, method="fedavg", accuracy=(80.0, 70.0, 60.0), **changes):
    """Write a run with three sites and three rounds; in the last round, the upload of site 2 is refused."""
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
    for k in (0, 1):  # the audit file of site 2 is missing
        messages = [{"time": "T", "round": None, "what": ["label counts"], "to": 0, "bytes": 16, "sha256": "00"}]
        for t in (t for t, members in enumerate(COHORTS) if k in members):
            what = ["_loss", "_seconds", "_flag", "_b", "dw"]
            messages.append(
                {"time": "T", "round": t, "what": what, "to": 0, "bytes": 100 + k, "sha256": f"{k}{t}" * 32}
            )
        write_lines(path / "audit" / f"rank-{k + 1}.jsonl", messages)
    return path


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def visible_text(page):
    """Return the text that a reader of the page sees, with a bar between cells of tables."""
    body = re.sub(r"<(svg|script|style).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", body.replace("</td>", " | "))).split())


def site_page_text(run, client, baseline=None):
    everybody = list_sites(run)
    return visible_text(site_pages.render_site_page(everybody[client], everybody, baseline))


def card_text(run, baseline=None, statements=()):
    return visible_text(site_pages.render_model_card(list_sites(run), baseline, dict(statements)))


# ---- contribution of a site ----
def test_the_page_of_a_site_names_no_other_site(tmp_path):
    run = Run(write_run(tmp_path / "r"))
    text = site_page_text(run, 0)
    assert "60 of 100" in text
    assert "3 of 3" in text
    assert not any(name in text for name in SITES[1:])
    lengths = site_pages.plot_update_norms(list_sites(run)[0])
    # no mean over a single other site, since it would disclose that site's norm
    assert lengths.data == [[0, 1.0, 2.5], [1, 1.0, None], [2, 1.0, None]]


# ---- benefit for a site ----
@pytest.mark.parametrize(
    ("together", "alone", "verdict"),
    [
        (80.0, 80.0, "the same"),
        (80.0, 70.0, "too close to tell"),  # error sqrt(.8 .2 / 40 + .7 .3 / 40) = 0.0962; twice that is 19.2 points
        (80.0, 61.0, "too close to tell"),  # 19 of 19.95
        (80.0, 59.0, "better together"),
        (50.0, 80.0, "better alone"),
    ],
)
def test_verdicts_need_a_difference_of_two_standard_errors(tmp_path, together, alone, verdict):
    run, other = (
        Run(write_run(tmp_path / "r", accuracy=[together] * 3)),
        write_run(tmp_path / "a", "local", [alone] * 3),
    )
    lower = "the same" if together == alone else "better together" if 1 / together < 1 / alone else "better alone"
    assert [row[-1] for row in compare_with_baseline(list_sites(run)[0], read_baseline(run, other))] == [verdict, lower]


def test_other_differences_of_a_baseline_are_listed(tmp_path):
    run = Run(write_run(tmp_path / "runs" / "r"))
    fair = write_run(tmp_path / "runs" / "fair", "local", data={**CONFIG["data"], "root": "elsewhere"})
    assert read_baseline(run, fair).differing_settings == []
    faster = write_run(tmp_path / "runs" / "faster", "local", train={"lr": 0.5})
    assert read_baseline(run, faster).differing_settings == ["train.lr"]
    in_turn = write_run(tmp_path / "runs" / "in_turn", "local", cohort={"sampling": "cyclic"})
    assert read_baseline(run, in_turn).differing_settings == ["cohort.sampling"]
    (cut := write_run(tmp_path / "runs" / "cut", "local")).joinpath("summary.json").unlink()
    assert "the way they ended" in read_baseline(run, cut).differing_settings[0]
    assert "differ in: train.lr" in site_page_text(run, 0, read_baseline(run, faster))
    with pytest.raises(
        UserError, match=r"is a run of method fedavg at north, .*; it must be a run of method local at the sites"
    ):
        read_baseline(run, run.path)


# ---- messages of a site ----
def test_messages_of_a_site_are_those_of_its_audit_file(tmp_path):
    run = Run(write_run(tmp_path / "r"))
    path, text = run.path / "audit" / "rank-2.jsonl", site_page_text(run, 1)
    assert "sent 3 messages" in text
    assert hashlib.sha256(path.read_bytes()).hexdigest() in text
    updates = "its mean training loss; batch statistics of the model; the update of the model's weights"
    assert f"its number of samples per class | 1 | 16 | server | {updates} | 2 | 202 | server |" in text
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert "no messages for 1 of the 2 rounds" in site_page_text(run, 1)
    assert "audit/rank-3.jsonl" in site_page_text(run, 2)


# ---- model card ----
def test_the_model_card_contains_metrics_statements_and_hashes(tmp_path):
    run = Run(write_run(tmp_path / "r"))
    other = read_baseline(run, write_run(tmp_path / "a", "local", (80.0, 99.0, 60.0)))
    text = card_text(run, other, {"intended use": "a second opinion"})
    assert "logistic, 28 weights" in text
    assert "worst result is south: accuracy (%) 60" in text
    assert "intended use | a second opinion" in text
    missing = re.search(r"Not stated: [^.]*", text)[0]
    assert "Approval and consent" in missing
    assert "Intended use" not in missing
    assert hashlib.sha256((run.path / "model.safetensors").read_bytes()).hexdigest() in text


def test_the_model_card_lists_limitations_of_the_run(tmp_path):
    text = card_text(Run(write_run(tmp_path / "r")))
    assert "south has few test samples (40, so one sample is 2.5 %)" in text
    assert f"All training samples of {SITES[1]} belong to one class" in text
    assert "north had more than half of the weight" in text
    assert "Uploads of south were refused in 1 rounds" in text
    assert "There is no local baseline" in text


def test_sites_with_few_test_samples_get_no_verdict(tmp_path):
    run = Run(with_num_test(write_run(tmp_path / "r"), {2: 19}))
    alone = read_baseline(run, write_run(tmp_path / "a", "local", (80.0, 99.0, 10.0)))
    assert "60 together, 10 alone: too few test samples (19) for a verdict" in site_page_text(run, 2, alone)
    text = card_text(run, alone)
    assert f"worst result is {SITES[1]}: accuracy (%) 70" in text
    assert "Sites with fewer than 20 test samples, too few for a comparison: south (19)" in text
    assert "worst result" not in card_text(Run(with_num_test(run.path, {1: 19, 2: 19})), alone)


def with_num_test(path, samples):
    """Set the numbers of test samples of some clients of a run."""
    rows = [json.loads(line) for line in (path / "clients.jsonl").read_text().splitlines()]
    write_lines(
        path / "clients.jsonl", [{**row, "samples": samples.get(row["client"], row["samples"])} for row in rows]
    )
    return path


def test_targets_other_than_classes_have_no_label_counts(tmp_path):
    path = write_run(tmp_path / "r", task={"name": "survival"})
    (path / "partition.json").write_text(json.dumps({"sizes": SIZES, "label_counts": [[0]] * 3}))
    run = Run(path)
    assert site_pages.build_samples_table(list_sites(run)).head == ("site", "training samples", "test samples")
    assert "samples per class" not in card_text(run)
    text = site_page_text(run, 1)
    assert "zeros in place of label counts" in text
    assert "its number of samples per class" not in text


def test_a_missing_loss_has_no_verdict(tmp_path):
    path = write_run(tmp_path / "r")
    rows = [json.loads(line) for line in (path / "clients.jsonl").read_text().splitlines()]
    write_lines(path / "clients.jsonl", [{**row, "loss": None} if row["client"] == 1 else row for row in rows])
    run = Run(path)
    alone = read_baseline(run, write_run(tmp_path / "a", "local"))
    assert compare_with_baseline(list_sites(run)[1], alone)[-1] == ["loss", None, 1 / 70, "-"]
    site_pages.write_site_pages(path, None, None, print)  # curves without a point do not fail


# ---- files ----
def test_pages_are_self_contained_and_escaped(tmp_path):
    path, printed = write_run(tmp_path / "runs" / "r"), []
    baseline = write_run(tmp_path / "runs" / "alone", "local")
    (tmp_path / "about.yaml").write_text("Contact: <script>alert(1)</script>\n")
    site_pages.write_site_pages(path, baseline, tmp_path / "about.yaml", printed.append)
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
    assert "local baseline" in printed[0]
    assert str(tmp_path) not in (path / "sites" / "north.html").read_text()  # no absolute paths
