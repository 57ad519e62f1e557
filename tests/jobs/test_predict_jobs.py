"""`fedmpi predict` as a command, on runs of one and of several processes."""

import csv
import random

import pytest
from helpers import fedmpi
from real_job import succeed


def write(path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["age", "who", "site", "sick"], *rows])


@pytest.mark.smoke
def test_any_number_of_ranks_writes_the_same_preparation_and_predictions(tmp_path):
    """With data.silos each site's rank writes its own preparation; otherwise rank 0 writes all."""
    draw = random.Random(0)
    rows = [
        [f"{draw.gauss(50, 9):.1f}", f"p{k}", "north" if k % 2 else "south", "yes" if k % 3 else "no"]
        for k in range(60)
    ]
    write(tmp_path / "all.csv", rows)
    for site in ("north", "south"):
        write(tmp_path / f"{site}.csv", [row for row in rows if row[2] == site])
    (tmp_path / "run.yaml").write_text(
        f"rounds: 1\noutput: {tmp_path}/runs\ntrace: false\nreport: false\n"
        f"data: {{source: table, root: {tmp_path}, label_column: sick, features: [age], class_names: ['no', 'yes']}}\n"
        "model: {name: logistic}\nmethod: {name: fedavg}\n"
    )
    silos = ["data.silos=[north, south]", "data.path='{site}.csv'"]
    partition = ["data.partition={scheme: site}", "data.site_column=site", "data.path=all.csv"]
    for form, files in ((silos, ["state/north/", "state/south/"]), (partition, [""])):
        kind = form[0][5:10]
        for name, ranks in (("one", {}), ("three", {"kind": "mpirun", "size": 3})):
            done = succeed("run", tmp_path / "run.yaml", f"name={kind}-{name}", *form, **ranks)
        one, three = (tmp_path / "runs" / f"{kind}-{name}" for name in ("one", "three"))
        for file in files:
            both = [(run / file / "preprocessing.json").read_bytes() for run in (one, three)]
            assert both[0] == both[1]
        for run in (one, three):
            done = succeed("predict", run, tmp_path / "north.csv", "--client", "0", "--id", "who")
        outs = [(run / "predictions" / "north.csv").read_text() for run in (one, three)]
        assert outs[0] == outs[1]
        assert outs[0].startswith("line,who,prediction,probability_no,probability_yes\n2,p1,")
    done = fedmpi("predict", tmp_path / "runs" / "silos-one", tmp_path / "none.csv", "--site", "north")
    assert done.returncode == 2
    assert done.stderr.strip() == f"fedmpi: error: {tmp_path}/none.csv does not exist"
