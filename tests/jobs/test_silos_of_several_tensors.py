"""Silos whose samples are several tensors: rank 0, which has none, knows their shapes."""

import subprocess

from helpers import BIN, clean_env, launcher
from real_job import rows

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


ON_SITES = """\
rounds: 2
output: OUT
name: sites
data: {source: "mine.py:source", silos: [a, bb]}
model: {name: "mine.py:reader"}
task: {name: next_symbol}
method: {name: fedavg}
evaluate: {protocol: [global, personal]}
compute: {threads: 1}
"""


def test_a_server_without_samples_knows_what_they_are(tmp_path):
    """Rank 0 makes its dry run on whole numbers, by name, though it opens no site; silos are as on one rank."""
    (tmp_path / "mine.py").write_text(SITES)
    found = {}
    for ranks in (1, 3):
        (tmp_path / "run.yaml").write_text(ON_SITES.replace("OUT", f"out{ranks}"))
        start = launcher("mpirun" if ranks > 1 else "alone", ranks)
        line = [*start, str(BIN / "fedmpi"), "run", "run.yaml"]
        done = subprocess.run(line, env=clean_env(), cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found[ranks] = rows(tmp_path / f"out{ranks}" / "sites")
    keys = ("sha256", "loss", "accuracy", "perplexity", "personal_perplexity_worst_decile")
    assert [[row[key] for key in keys] for row in found[1]] == [[row[key] for key in keys] for row in found[3]]
