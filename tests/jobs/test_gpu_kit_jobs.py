"""`make gpu` ends parts that hang."""

import json
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT, wait_until_ended

# Its child has left the process group, as torchrun's ranks do, and does not heed SIGTERM.
HANGS = """
import json, pathlib, subprocess, sys, time
folder, word = sys.argv[1:]
program = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); open(sys.argv[1], 'w'); time.sleep(600)"
found = json.loads(next(pathlib.Path(folder, "to").glob("*.json")).read_text())
print("on disk:", found["running"], [part["part"] for part in found["parts"]], flush=True)
subprocess.Popen([sys.executable, "-c", program, f"{folder}/ready", word], start_new_session=True)
time.sleep(600)
"""


@pytest.fixture
def kit(monkeypatch):
    """Return the module, with parts that the test defines; the handler of SIGTERM is restored afterwards."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks" / "gpu"), *sys.path])
    import kit

    monkeypatch.setattr(kit, "describe_gpu", lambda: {"usable": False})
    handler = signal.getsignal(signal.SIGTERM)
    yield kit
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.smoke
def test_a_hanging_part_is_ended_with_its_children(kit, tmp_path, monkeypatch, capsys):
    word, wait = f"hangs-{tmp_path}", subprocess.Popen.wait
    parts = [
        kit.Part("first", ["-c", "print('one')"], 100),
        kit.Part("hangs", ["-c", HANGS, str(tmp_path), word], 100),
        kit.Part("fails", ["-c", "raise SystemExit('no')"], 100),
        kit.Part("last", ["-c", "print('four')"], 100),
    ]

    def wait_until_it_hangs(process, timeout=None):
        if process.args[-1] != word or process.returncode is not None:
            return wait(process, timeout)
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            time.sleep(0.02)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_until_it_hangs)
    monkeypatch.setattr(kit, "measures_and_tests", lambda device, folder: parts)
    monkeypatch.setattr(kit, "GRACE_S", 0.5)
    monkeypatch.setattr(sys, "argv", ["kit.py", "--to", str(tmp_path / "to")])
    with pytest.raises(SystemExit) as ended:
        kit.main()
    assert ended.value.code == 1
    assert wait_until_ended(word)
    (file,) = (tmp_path / "to").iterdir()
    found = json.loads(file.read_text())
    assert [(part["part"], part["code"]) for part in found["parts"]] == [
        ("first", 0), ("hangs", 124), ("fails", 1), ("last", 0),
    ]  # fmt: skip
    assert found["parts"][1]["lines"] == ["on disk: hangs ['first']", "not done after 100 s: ended"]
    assert "| fails | FAILED, exit code 1: no |" in capsys.readouterr().out
