"""A sweep whose runs are processes: failures, signals, and resuming."""

import multiprocessing
import os
import signal
import subprocess

import pytest
from helpers import BIN, SMALL_SWEEP, clean_env, fedmpi, wait_until_ended, warm_env
from real_job import LIMIT_S, rows, succeed, wait_until

from fedmpi.sweeps import expand, pool


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(SMALL_SWEEP)
    return path


@pytest.mark.smoke
def test_a_failed_run_is_reported(file, tmp_path):
    file.write_text(SMALL_SWEEP.replace("FedAvg: {}", f'bad: {{model: {{name: "{tmp_path}/mine.py:net"}}}}'))
    (tmp_path / "mine.py").write_text("def net(input_shape, classes):\n    raise OSError('no such weights')\n")
    done = fedmpi("sweep", file, "--jobs", 1, cwd=tmp_path, cold=True)
    assert done.returncode == 2
    assert "bad_seed-0: FAILED (exit code 2)" in done.stdout
    assert "no such weights" in done.stdout
    assert "2 of 4 runs failed" in done.stderr
    assert "bad_seed-1.log" in done.stderr
    assert "fedprox_seed-1: accuracy" in done.stdout  # the others were trained all the same
    status = fedmpi("sweep", file, "--status", cwd=tmp_path)
    *failed, last = status.stdout.splitlines()
    assert [line.partition(": ")[2][:24] for line in failed] == ["failed, 0 of 2 rounds: m"] * 2
    assert last == "2 of 4 runs done, 2 failed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_sweep_leaves_no_process_and_can_be_resumed(file, tmp_path, number):
    """The same command runs the rest, with the bits of a sweep that was not stopped."""
    command = [BIN / "fedmpi", "sweep", file, "rounds=100000", "--jobs", "2"]
    process = subprocess.Popen(command, cwd=tmp_path, env=warm_env(clean_env()), stdout=subprocess.PIPE, text=True)
    first = tmp_path / "runs" / "few" / "fedavg_seed-0"
    wait_until(lambda: process.poll() is not None or len(rows(first)) >= 3)
    process.send_signal(number)
    said = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == (-number if number == signal.SIGKILL else 75), said
    assert wait_until_ended(str(file))
    if number != signal.SIGKILL:
        assert f"stopped; to continue: fedmpi sweep {file} rounds=100000" in said
    words = [f"rounds={len(rows(first)) + 3}", "include={seed: [0], method: [FedAvg]}"]
    for name in ("few", "whole"):
        succeed("sweep", file, *words, f"name={name}", cwd=tmp_path)
    assert not list(first.parent.glob("*-2"))
    whole = tmp_path / "runs" / "whole" / "fedavg_seed-0"
    assert [row["sha256"] for row in rows(first)] == [row["sha256"] for row in rows(whole)]


def test_no_run_starts_after_a_signal(file):
    """Even if the signal comes just before the next run starts.

    A child that has just ended does not make the handler fail.
    """
    (_, settings), *_ = expand.load_sweep(file).first_stage_runs()
    begun = pool.ProcessPool(lambda settings: os._exit(3), 1, (), lambda ended: None)
    begun.stop_signals = 1
    begun._start_run(settings)
    assert not begun.active_runs
    child = multiprocessing.get_context("fork").Process()
    child.start()
    os.waitpid(child.pid, 0)
    begun.active_runs.append(pool.ActiveRun(settings, child, 0, 0.0))
    begun._forward_stop_signal(signal.SIGTERM, None)
    assert begun.stop_signals == 2
