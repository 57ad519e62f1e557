"""A job of real processes: started in the background, watched through its record, struck by signals, and ended."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import yaml
from helpers import ROOT, clean_env, fedmpi, launcher, warm

AGAIN = 75  # exit code of a run that can be resumed
LIMIT_S = 240  # for what takes seconds: a machine that others use may be slow
CONFIG = {
    "name": "run",
    "rounds": 100_000,  # it ends because a test ends it, never by itself
    "data": {"source": "digits", "partition": {"scheme": "iid", "clients": 6}},
    "model": {"name": "mlp"},
    "method": {"name": "scaffold"},
    "evaluate": {"protocol": ["global", "personal"]},
    "report": False,  # a second at the end of each job; tests/docs has runs with one
}


PARTIAL = CONFIG | {  # with cohorts of which some clients have their state on disk
    "data": {"source": "digits", "partition": {"scheme": "dirichlet", "clients": 6, "alpha": 0.3}},
    "cohort": {"fraction": 0.5},
    "state": {"memory": 0.0005},  # two or three of the six rows
}


def wait_until(condition, describe=lambda: "", limit_s=LIMIT_S):
    """Wait until condition() is true; fail with describe() if it does not become so."""
    end = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {limit_s} s: {describe()}"
        time.sleep(0.05)
    return value


def processes(*words):
    """The processes whose command line and environment hold all of these words: {number: its environment}."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (path / "environ").read_text()
            text = (path / "cmdline").read_text() + "\0" + environment
            if all(word in text for word in words):
                found[int(path.name)] = environment.split("\0")
    return found


def rows(run, name="metrics.jsonl"):
    """The rows of a record of a run directory; none where there is none yet, nor of a line that is being written."""
    path = run / name
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def hashes(run):
    """The SHA-256 of the global model after each round."""
    return [row["sha256"] for row in rows(run)]


def succeed(*words, **how):
    """Run `fedmpi words`, which must succeed."""
    done = fedmpi(*words, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def assert_same(a, b):
    """Rounds, bits and figures of two runs; each round once."""
    times = ("wall_s", "train_s", "wait_s", "server_s", "evaluate_s", "sent_bytes", "received_bytes")
    left, right = ([{k: v for k, v in row.items() if k not in times} for row in rows(x)] for x in (a, b))
    assert left == right
    assert [row["round"] for row in left] == list(range(len(left)))
    lines = [sorted((x / "clients.jsonl").read_text().splitlines()) for x in (a, b)]
    assert lines[0] == lines[1]
    updates = [(x / "updates.jsonl").read_text() for x in (a, b)]
    assert updates[0] == updates[1]
    assert len(updates[0].splitlines()) == len(left)
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


def undisturbed(job, rounds):
    """The run directory of a run of `rounds` rounds in one process, of the same config as a job."""
    done = fedmpi("run", job.folder / "run.yaml", f"name=whole-{rounds}", f"rounds={rounds}", limit_s=600)
    assert done.returncode == 0, done.stderr
    return job.folder / f"whole-{rounds}"


@contextlib.contextmanager
def inherited(number, handler):
    """What a process that is started meanwhile does with a signal; pytest itself may be under nohup."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


class Job:
    """An endless run in the background.

    Args:
        folder: is made; holds run.yaml, the run directory `run` and what the job prints.
        kind: launcher; "script mpirun" and "script torchrun" are the scripts of launch/, "ulfm" is mpirun --with-ft.
        size: number of ranks.
        env: variables beside those of the tests.
        cold: start Python anew in every rank; else what a run needs is imported already (fork_server.py).
        changes: to CONFIG.
    """

    def __init__(self, folder, kind="alone", size=1, cold=True, env=None, **changes):
        self.folder, self.run, self.kind, self.size = folder, folder / "run", kind, size
        folder.mkdir(exist_ok=True)
        (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "output": str(folder), **changes}))
        self.log = (folder / "out").open("a")
        self.env = (clean_env() if cold else warm()) | (env or {})
        self.command = self._command(kind, size)
        self.start()

    def _command(self, kind, size):
        if kind.startswith("script "):
            kind = kind.split()[1]
            launcher(kind, size)  # skips the test where there is no such launcher
            return [str(ROOT / "launch" / f"{kind}.sh"), str(size)]
        command = launcher("mpirun" if kind == "ulfm" else kind, size)
        if kind == "ulfm":
            command[1:1] = ["--with-ft", "ulfm"]
        elif kind == "torchrun":  # which prints a traceback of its own beside what the ranks print
            command[1:1] = ["--redirects", "3", "--log-dir", str(self.folder / "ranks")]
        return [*command, "fedmpi", "run"]

    def start(self, *overrides):
        # A session of its own: what a terminal's Ctrl-C reaches is the launcher and whoever shares its group.
        with inherited(signal.SIGHUP, signal.SIG_DFL):  # a shell cannot trap what it was started to ignore
            self.process = subprocess.Popen(
                [*self.command, str(self.folder / "run.yaml"), *overrides],
                env=self.env,
                cwd=ROOT,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, condition):
        def ended_or_true():
            value = condition()
            assert value or self.process.poll() is None, self.text()
            return value

        return wait_until(ended_or_true, self.text)

    def wait_for_rounds(self, n):
        self.wait_for(lambda: len(self.rows()) >= n)

    def rows(self):
        return rows(self.run)

    def summary(self):
        return json.loads((self.run / "summary.json").read_text())

    def text(self):
        """What launcher and ranks have printed."""
        return (self.folder / "out").read_text(errors="replace") + self.said() * (self.kind == "torchrun")

    def said(self):
        """What the ranks have printed; of mpirun, what mpirun has printed, too."""
        logs = sorted((self.folder / "ranks").rglob("*.log"))
        return "".join(path.read_text(errors="replace") for path in (logs or [self.folder / "out"]))

    def only_message(self):
        """The one message in which the job says why it failed."""
        messages = [line for line in self.said().splitlines() if line.startswith("fedmpi")]
        assert len(messages) == 1, self.said()
        assert "Traceback" not in self.said()
        return messages[0]

    def find_rank(self, number):
        """The process of a rank, or None."""
        found = processes(str(self.folder / "run.yaml"))
        names = (f"OMPI_COMM_WORLD_RANK={number}", f"RANK={number}")
        return next((pid for pid, environment in found.items() if set(names) & set(environment)), None)

    def rank(self, number):
        """The process of a rank, which is waited for."""
        return self.wait_for(lambda: self.find_rank(number))

    def alive(self):
        """The processes of this job that are left."""
        return sorted(processes(str(self.folder / "run.yaml")))

    def wait(self, limit_s=LIMIT_S):
        """Wait for the job's end and return its exit code; no process of the job may outlive it."""
        wait_until(lambda: self.process.poll() is not None, self.text, limit_s)
        wait_until(lambda: not self.alive(), lambda: f"{self.alive()} are left: {self.text()}")
        return self.process.returncode

    def kill(self):
        """End all processes of the job, as a power cut does."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def assert_stopped(self, number):
        """The run was stopped by a signal, and its run directory is whole; None: rank 0 did not hear the signal.

        Where all ranks hear it, rank 0 may be told by another one before it hears the signal itself.
        """
        rounds = [row["round"] for row in self.rows()]
        assert rounds == list(range(len(rounds)))
        assert len(rounds) >= 2
        summary = self.summary()
        assert summary["rounds"] == len(rounds)
        expected = {"stopped"} if self.size > 1 else set()
        assert summary["exit_reason"] in expected | ({f"signal {int(number)}"} if number else set())
        assert not list(self.run.glob(".*.tmp"))
        assert "Traceback" not in self.text()
        assert "defect" not in self.text()
