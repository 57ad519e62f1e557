"""Features, outputs and their similarity in the report."""

import json

from fedmpi.analysis.pages.runs import read
from fedmpi.analysis.pages.sections import features

SEEN = {
    **{"deviation": 0.3, "deviation_local": 0.2, "energy": 0.1, "energy_local": 0.15, "rank": 4.0, "rank_local": 3.0},
    **{"uniformity": 0.4, "uniformity_local": 0.5, "spectrum": [2.0, 1.0], "spectrum_local": [3.0, 0.5]},
    **{"classifier": [2.5, 1.5], "classifier_local": [1.0]},
    **{"predicted": [[0.9, 0.1], [0.2, 0.8]], "by_class": [[0.7, 0.3], [0.4, 0.6]]},
}
ALIKE = {"pairs_mean": 0.5, "before_mean": 0.7, "after_mean": 0.8, "matrix": [[1.0, 0.5], [0.5, 1.0]]}


def made(path, rows, seed=0):
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(f"name: {path.name}\nseed: {seed}\nmethod: {{name: fedavg}}\n")
    (path / "metrics.jsonl").write_text('{"round": 0, "accuracy": 50.0}\n')
    (path / "analysis.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def section(*paths):
    found = features.seen(read(paths))
    return found and {part.name: part for part in found.parts}


def test_of_one_run(tmp_path):
    later = {**SEEN, "deviation": 0.35, "spectrum": [4.0, 1.0]}
    rows = [
        {"round": 0, "clients": [4, 7], "features": SEEN, "similarity": ALIKE},
        {"round": 5, "clients": [7, 8], "features": later, "similarity": {**ALIKE, "pairs_mean": None}},
    ]
    found = section(made(tmp_path / "r", rows))
    names = ["features-deviation", "features-classifier", "features-energy", "features-uniformity", "features-rank"]
    curves = [f"{name}-by-round" for name in (*names, "similarity-after")]
    maps = ["features-predicted", "features-by-class", "similarity-matrix"]
    assert list(found) == [*curves, "features-spectrum", "features-classifier", *maps]
    assert found["features-deviation-by-round"].data == [[0, 0.3, 0.2], [5, 0.35, 0.2]]
    assert found["similarity-after-by-round"].data == [[0, 0.8, 0.7, 0.5], [5, 0.8, 0.7, None]]
    assert found["features-classifier-by-round"].data[0] == [0, 2.0, 1.0]  # means of lists
    spectrum = found["features-spectrum"].chart.series
    names = ["global model, round 0", "global model, round 5", "local models, mean, round 5"]
    assert [(line.label, line.y) for line in spectrum] == list(zip(names, ([2, 1], [4, 1], [3, 0.5]), strict=True))
    assert found["features-spectrum"].data[2:4] == [[names[1], 1, 4.0], [names[1], 2, 1.0]]
    assert found["features-predicted"].data[1] == ["7", "1", 0.1]
    assert found["features-predicted"].title.endswith("round 5")
    assert found["features-by-class"].chart.values == [[0.7, 0.3], [0.4, 0.6]]
    assert found["similarity-matrix"].chart.rows == ["7", "8"]
    assert found["similarity-matrix"].head == ("client", "other client", "CKA")


def test_without_it_there_is_no_section(tmp_path):
    assert section(made(tmp_path / "r", [])) is None
    odd = [{"round": "x", "features": 3}, {"round": 1, "features": {"spectrum": [None], "predicted": "?"}}]
    assert section(made(tmp_path / "odd", odd)) is None
