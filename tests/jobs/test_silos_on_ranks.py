"""Silos give the same partition and model on any number of ranks, although each rank opens only its own sites."""

import numpy as np
from real_job import hashes, rows, succeed


def run_on_one_and_three_ranks(folder, config, kind="mpirun"):
    """Return the run directories of one process and of three ranks, after a check that their models are equal."""
    (folder / "run.yaml").write_text(f"rounds: 2\noutput: {folder}/runs\nreport: false\n{config}")
    for name, how in (("one", {}), ("three", {"kind": kind, "size": 3})):
        succeed("run", folder / "run.yaml", f"name={name}", "compute.threads=1", cwd=folder, **how)
    runs = [folder / "runs" / name for name in ("one", "three")]
    assert hashes(runs[0]) == hashes(runs[1])
    return runs


def test_held_out_patients_are_the_same_on_any_ranks(tmp_path):
    """Only a site knows how many rows it holds out by patient; every rank's partition.json has the same numbers."""
    g = np.random.default_rng(0)
    for site, n in (("north", 40), ("south", 60)):
        lines = [f"{g.normal()},{g.integers(2)},p{i // 4 if i < 20 else i}" for i in range(n)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["age,sick,who", *lines, ""]))
    one, several = run_on_one_and_three_ranks(
        tmp_path,
        f"data: {{source: table, root: {tmp_path}, silos: [north, south], path: '{{site}}.csv', label_column: sick,\n"
        "  group_column: who, class_names: [0, 1], validation: 0.3}\nmodel: {name: logistic}\nmethod: {name: fedavg}\n",
    )
    for file in ("partition.json", "model.safetensors"):
        assert (one / file).read_bytes() == (several / file).read_bytes(), file


def test_standardised_targets_are_pooled_by_sums(tmp_path):
    rng = np.random.default_rng(0)
    for k, name in enumerate(("a", "b")):
        x = rng.normal(size=(30, 2)).round(3)
        lines = [f"{u},{v},{150_000 * (1 + k) + 60_000 * u - 20_000 * v:.0f}" for u, v in x]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,z,price", *lines]) + "\n")
    _, several = run_on_one_and_three_ranks(
        tmp_path,
        f"data: {{source: table, root: {tmp_path}, silos: [a, b], path: '{{site}}.csv', label_column: price,\n"
        "  target: number, standardise_target: pooled}\nmodel: {name: logistic}\ntask: {name: regression}\n"
        "method: {name: fedavg}\ntrain: {lr: 0.1, batch_size: 8}\n",
        kind="torchrun",
    )
    sent = [each["what"] for each in rows(several / "audit", "rank-1.jsonl")]
    assert ["number, sum and sum of squares of targets"] in sent


SITES = """\
import torch
from torch import nn
import fedmpi

def source(root, site=None):
    g = torch.Generator().manual_seed(len(site))
    s = torch.randint(0, 7, (30, 6), generator=g)
    x = {"ids": s[:, :-1], "mask": s[:, :-1] > 0}
    cut = lambda rows: {k: v[rows] for k, v in x.items()}
    return fedmpi.Dataset(cut(slice(20)), s[:20, 1:], cut(slice(20, 30)), s[20:, 1:], classes=7)

class Reader(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.embedding = nn.Embedding(classes, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, ids, mask):
        return self.head(self.embedding(ids) * mask[..., None])

def reader(input_shape, classes):
    assert input_shape == {"ids": (5,), "mask": (5,)}
    return Reader(classes)
"""


def test_a_server_without_samples_knows_that_they_are_several_tensors(tmp_path):
    """Rank 0 makes its dry run with named integer tensors, although it opens no site."""
    (tmp_path / "mine.py").write_text(SITES)
    runs = run_on_one_and_three_ranks(
        tmp_path,
        'data: {source: "mine.py:source", silos: [a, bb]}\nmodel: {name: "mine.py:reader"}\n'
        "task: {name: next_symbol}\nmethod: {name: fedavg}\nevaluate: {protocol: [global, personal]}\n",
    )
    keys = ("loss", "accuracy", "perplexity", "personal_perplexity_worst_decile")
    one, several = ([[row[key] for key in keys] for row in rows(run)] for run in runs)
    assert one == several
