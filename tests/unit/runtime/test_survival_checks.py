"""Errors and warnings before a run with the task survival, and metrics of sites without events."""

import json
import warnings

import numpy as np
import pytest

import fedmpi
from fedmpi.common.errors import UserError

BASE = """\
rounds: 1
data:
  {{source: table, root: {root}, path: a.csv, label_column: [dead, days], site_column: who,
   partition: {{scheme: site}}}}
model: {{name: logistic}}
task: {{name: survival}}
evaluate: {{protocol: [global, personal, sites]}}
output: {root}/runs
"""


@pytest.fixture
def run(tmp_path):
    """Return a function that runs three sites, one without events, and returns the warnings."""
    draw = np.random.default_rng(0)
    rows = [
        f"{draw.normal():.3f},{int(who != 'south' and draw.random() < 0.7)},{draw.exponential(90):.1f},{who}"
        for who in ("east", "north", "south")
        for _ in range(30)
    ]
    (tmp_path / "a.csv").write_text("\n".join(["age,dead,days,who", *rows]) + "\n")
    (tmp_path / "run.yaml").write_text(BASE.format(root=tmp_path))

    def start(*overrides):
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            fedmpi.run(tmp_path / "run.yaml", list(overrides))
        return [str(each.message) for each in messages]

    return start


def test_a_site_without_events_has_no_loss(run, tmp_path):
    run("method.name=fedavg", "train.batch_size=16")
    folder = next((tmp_path / "runs").rglob("metrics.jsonl")).parent
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["loss@south"] is None
    assert row["sites_loss"] == pytest.approx((row["loss@east"] + row["loss@north"]) / 2)
    lines = [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]
    own = {line["site"]: line["loss"] for line in lines if line["protocol"] == "personal"}
    assert own["south"] is None
    assert row["personal_loss"] == pytest.approx((own["east"] + own["north"]) / 2)


def test_survival_with_batches_of_one_row_is_refused(run):
    with pytest.raises(UserError, match=r"train\.batch_size: 1 is not allowed with task survival"):
        run("method.name=fedavg", "train.batch_size=1")


@pytest.mark.parametrize(("method", "says"), [("fedper", True), ("fedavg", False), ("local", False)])
def test_a_method_that_shares_no_weights_causes_a_warning(run, method, says):
    messages = [
        text for text in run(f"method.name={method}", "evaluate.protocol=[personal]") if "shares no weights" in text
    ]
    assert len(messages) == says
    assert not says or "method fedper shares no weights of model logistic: all layer groups (head)" in messages[0]
