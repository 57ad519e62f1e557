"""data.standardise_target: pooled, where each site's rank has its own rows alone."""

import numpy as np
from real_job import hashes, rows, succeed


def test_the_sums_of_the_sites_are_pooled_by_any_number_of_ranks(tmp_path):
    rng = np.random.default_rng(0)
    for k, name in enumerate(("a", "b")):
        x = rng.normal(size=(30, 2)).round(3)
        lines = [f"{u},{v},{150_000 * (1 + k) + 60_000 * u - 20_000 * v:.0f}" for u, v in x]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,z,price", *lines]) + "\n")
    (tmp_path / "run.yaml").write_text(
        f"rounds: 2\noutput: {tmp_path}/runs\n"
        f"data: {{source: table, root: {tmp_path}, silos: [a, b], path: '{{site}}.csv', label_column: price, "
        "target: number, standardise_target: pooled}\n"
        "model: {name: logistic}\ntask: {name: regression}\nmethod: {name: fedavg}\n"
        "train: {lr: 0.1, batch_size: 8}\ncompute: {threads: 1}\n"
    )
    digests = []
    for kind, size in (("alone", 1), ("torchrun", 3)):
        succeed("run", tmp_path / "run.yaml", f"name={kind}", kind=kind, size=size)
        digests.append(hashes(tmp_path / "runs" / kind))
    assert digests[0] == digests[1]
    told = rows(tmp_path / "runs/torchrun/audit", "rank-1.jsonl")
    assert ["number, sum and sum of squares of targets"] in [each["what"] for each in told]
