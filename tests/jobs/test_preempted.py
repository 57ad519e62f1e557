"""A run that is preempted again and again by launch/mpirun.sh: the bits of the undisturbed one, each round once."""

import random
import signal
import subprocess
import time

import pytest
import yaml
from helpers import ROOT, clean_env, fedmpi, launcher
from test_going_on import CONFIG, rows, same
from test_signals import inherited

AGAIN = 75


def start(place, name):
    command = [str(ROOT / "launch" / "mpirun.sh"), "3", str(place / "run.yaml"), f"name={name}"]
    log = (place / f"{name}.log").open("a")
    with inherited(signal.SIGHUP, signal.SIG_DFL):  # a shell cannot trap what it was started to ignore
        return subprocess.Popen(
            [*command, "checkpoint.resume=auto"],
            env=clean_env(),
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def preempted(place, times, seed):
    """The run of run.yaml, told to stop at a random time after a random number of its rounds; how often it was."""
    chance = random.Random(seed)
    launcher("mpirun", 3)  # or skip
    folder = place / "torn"
    for done in range(3 * times):
        process = start(place, "torn")
        limit = time.monotonic() + 120
        if done < times:
            # One in four in the start, before any round; the others some rounds later, anywhere in one.
            more = 0 if chance.random() < 0.25 else chance.randint(1, 4)
            enough = len(rows(folder)) + more
            while len(rows(folder)) < enough and process.poll() is None and time.monotonic() < limit:
                time.sleep(0.01)
            time.sleep(0.2 + chance.random() * (0.2 if more else 4))
            process.send_signal(chance.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]))
        code = process.wait(120)
        if code == 0:
            return done
        assert code == AGAIN, (place / "torn.log").read_text()
    raise AssertionError("never finished")


def trial(place, times, rounds, seed):
    (place / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "rounds": rounds, "output": str(place)}))
    done = fedmpi("run", place / "run.yaml", "name=whole", limit_s=600)
    assert done.returncode == 0, done.stderr
    count = preempted(place, times, seed)
    same(place / "torn", place / "whole")
    said = (place / "torn.log").read_text()
    assert "Traceback" not in said
    assert said.count("stopped early") <= count
    return count


def test_three_preemptions(tmp_path):
    assert trial(tmp_path, 3, 240, 0) == 3  # of 60 rounds none were left for the third one on a quiet machine


@pytest.mark.soak
def test_twenty_preemptions(tmp_path):
    count = trial(tmp_path, 20, 150, random.randrange(10**6))
    assert count == 20, f"finished after {count}: give it more rounds"
