"""Rejected uploads and failed clients in jobs of several ranks: the bits of one process, and one warning."""

import json

import pytest
import yaml
from real_job import rows, succeed

METHOD = """
from dataclasses import dataclass
import fedmpi
from fedmpi.method import FLAT, SlotValues, Slots, State

@dataclass(frozen=True)
class Wild(fedmpi.Method):
    client_state = Slots(drift=FLAT)

    def upload(self, k):
        if (k.id, k.round) == (1, 1) and FAILS:
            raise ValueError("this sample cannot be read")
        dw = k.w - k.w0
        return SlotValues(dw=dw * 1e7 if (k.id, k.round) == (1, 1) else dw), State(drift=k.state.drift + dw)

    def personal_weights(self, k):
        return k.received + k.state.drift
"""


@pytest.mark.parametrize("fails", [False, True], ids=["huge update", "error"])
def test_rejected_uploads_do_not_depend_on_the_number_of_ranks(tmp_path, fails):
    """They are listed and counted in metrics.jsonl and summary.json; clients and their states move between ranks."""
    (tmp_path / "wild.py").write_text(METHOD.replace("FAILS", str(fails)))
    tree = {
        "rounds": 4,
        "seed": 1,
        "output": str(tmp_path / "runs"),
        "data": {"source": "digits", "partition": {"scheme": "dirichlet", "clients": 5, "alpha": 0.5}},
        "model": {"name": "logistic"},
        "method": {"name": f"{tmp_path}/wild.py:Wild"},
        "cohort": {"fraction": 0.8},
        "evaluate": {"protocol": ["global", "personal"]},
        "faults": {"on_client_error": "drop"} if fails else {"on_bad_update": "drop"},
    }
    records = []
    for kind, size in (("alone", 1), ("mpirun", 3)):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree | {"name": kind}))
        done = succeed("run", tmp_path / "run.yaml", kind=kind, size=size)
        warning = "round 1, client 1: " if fails else "round 1: client 1 sent an update of norm"
        assert done.stderr.count(f"warning: {warning}") == 1, done.stderr
        assert (f"{tmp_path}/wild.py:12" in done.stderr) == fails
        told = rows(tmp_path / "runs" / kind)
        assert [[each["client"] for each in row["refused"]] for row in told] == [[], [1], [], []]
        assert fails or told[1]["refused"][0]["norm"] > told[1]["refused"][0]["bound"] > 0
        summary = json.loads((tmp_path / "runs" / kind / "summary.json").read_text())
        assert summary["client_errors" if fails else "refused_uploads"] == 1
        records.append([(row["sha256"], row["personal_loss"], str(row["refused"])) for row in told])
    assert records[0] == records[1]
