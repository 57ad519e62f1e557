"""A callback that fails, on three ranks."""

import yaml
from real_job import succeed

CALLBACKS = """
class Fails:
    def round(self, row):
        raise ValueError("broken\\nhere")
"""
CONFIG = {
    "rounds": 3,
    "data": {"source": "digits", "partition": {"scheme": "iid", "clients": 4}},
    "model": {"name": "logistic"},
    "method": {"name": "fedavg"},
}


def test_a_callback_that_fails_keeps_nobody_waiting(tmp_path):
    (tmp_path / "mine.py").write_text(CALLBACKS)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG | {"output": str(tmp_path)}))
    done = succeed("run", tmp_path / "run.yaml", f"callbacks=[{tmp_path}/mine.py:Fails]", kind="mpirun", size=3)
    assert done.stderr.count("ValueError: broken here; it is told nothing more, and the run goes on") == 1
