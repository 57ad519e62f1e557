"""Run a job of real processes in the background, follow its records, send it signals, and end it."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import yaml
from helpers import ROOT, clean_env, fedmpi, launcher, warm_env

RESUMABLE = 75  # exit code of a run that can be resumed
LIMIT_S = 240  # limit of waits that normally take seconds, since the machine may be busy
CONFIG = {
    "name": "run",
    "rounds": 100_000,  # it ends because a test ends it, never by itself
    "data": {"source": "digits", "partition": {"scheme": "iid", "clients": 6}},
    "model": {"name": "mlp"},
    "method": {"name": "scaffold"},
    "evaluate": {"protocol": ["global", "personal"]},
    "report": False,  # a second at the end of each job; tests/docs has runs with one
}


PARTIAL = CONFIG | {  # a part of the clients per round, some with their state on disk
    "data": {"source": "digits", "partition": {"scheme": "dirichlet", "clients": 6, "alpha": 0.3}},
    "cohort": {"fraction": 0.5},
    "client_state": {"max_gib": 0.0005},  # two or three of the six rows
}


def wait_until(condition, describe=lambda: "", limit_s=LIMIT_S):
    """Wait until condition() is true; fail with the message describe() after a time limit."""
    end = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {limit_s} s: {describe()}"
        time.sleep(0.05)
    return value


def processes(*words):
    """Return {process id: environment} of the processes whose command line and environment contain all these words."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (path / "environ").read_text()
            text = (path / "cmdline").read_text() + "\0" + environment
            if all(word in text for word in words):
                found[int(path.name)] = environment.split("\0")
    return found


def rows(run, name="metrics.jsonl"):
    """Return the complete rows of a file of a run directory; an empty list if the file does not exist yet."""
    path = run / name
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def hashes(run):
    """Return the SHA-256 of the global model after each round."""
    return [row["sha256"] for row in rows(run)]


def succeed(*words, **how):
    """Run `fedmpi words` and return the result; fail if the exit code is not 0."""
    done = fedmpi(*words, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def assert_same(a, b):
    """Check that two runs have the same rounds, each once, the same metrics and the same bits."""
    times = ("wall_s", "train_s", "wait_s", "server_s", "evaluate_s", "sent_bytes", "received_bytes")
    left, right = ([{k: v for k, v in row.items() if k not in times} for row in rows(x)] for x in (a, b))
    assert left == right
    assert [row["round"] for row in left] == list(range(len(left)))
    lines = [sorted((x / "clients.jsonl").read_text().splitlines()) for x in (a, b)]
    assert lines[0] == lines[1]
    updates = [(x / "update_stats.jsonl").read_text() for x in (a, b)]
    assert updates[0] == updates[1]
    assert len(updates[0].splitlines()) == len(left)
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


def run_undisturbed(job, rounds):
    """Run the config of a job for `rounds` rounds in one process, undisturbed, and return the run directory."""
    done = fedmpi("run", job.folder / "run.yaml", f"name=whole-{rounds}", f"rounds={rounds}", limit_s=600)
    assert done.returncode == 0, done.stderr
    return job.folder / f"whole-{rounds}"


@contextlib.contextmanager
def inherited_handler(number, handler):
    """Set the handler of a signal that processes inherit within this context; pytest itself may run under nohup."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


class Job:
    """An endless run in the background.

    Args:
        folder: is created; contains run.yaml, the run directory `run` and the output of the job.
        kind: launcher; "script mpirun" and "script torchrun" are the scripts of launch/, "ulfm" is mpirun --with-ft.
        size: number of ranks.
        env: environment variables in addition to those of the tests.
        cold: start a new Python in every rank; otherwise torch is already imported (fork_server.py).
        changes: keys that replace those of CONFIG.
    """

    def __init__(self, folder, kind="alone", size=1, cold=True, env=None, **changes):
        self.folder, self.run, self.kind, self.size = folder, folder / "run", kind, size
        folder.mkdir(exist_ok=True)
        (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "output": str(folder), **changes}))
        self.log = (folder / "out").open("a")
        self.env = (clean_env() if cold else warm_env()) | (env or {})
        self.command = self._command(kind, size)
        self.start()

    def _command(self, kind, size):
        if kind.startswith("script "):
            kind = kind.split()[1]
            launcher(kind, size)  # skips the test if the launcher is missing
            return [str(ROOT / "launch" / f"{kind}.sh"), str(size)]
        command = launcher("mpirun" if kind == "ulfm" else kind, size)
        if kind == "ulfm":
            command[1:1] = ["--with-ft", "ulfm"]
        elif kind == "torchrun":  # separate logs, because torchrun prints a traceback of its own
            command[1:1] = ["--redirects", "3", "--log-dir", str(self.folder / "ranks")]
        return [*command, "fedmpi", "run"]

    def start(self, *overrides):
        # A new session, so that signals to the launcher's process group do not reach pytest.
        with inherited_handler(
            signal.SIGHUP, signal.SIG_DFL
        ):  # a shell cannot trap a signal that it was started to ignore
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
        """Return the output of the launcher and of the ranks."""
        return (self.folder / "out").read_text(errors="replace") + self.ranks_output() * (self.kind == "torchrun")

    def ranks_output(self):
        """Return the output of the ranks; under mpirun it includes that of mpirun."""
        logs = sorted((self.folder / "ranks").rglob("*.log"))
        return "".join(path.read_text(errors="replace") for path in (logs or [self.folder / "out"]))

    def only_message(self):
        """Return the job's error message; fail if there are several, or none."""
        messages = [line for line in self.ranks_output().splitlines() if line.startswith("fedmpi")]
        assert len(messages) == 1, self.ranks_output()
        assert "Traceback" not in self.ranks_output()
        return messages[0]

    def find_rank(self, number):
        """Return the process id of a rank, or None if there is no such process."""
        found = processes(str(self.folder / "run.yaml"))
        names = (f"OMPI_COMM_WORLD_RANK={number}", f"RANK={number}")
        return next((pid for pid, environment in found.items() if set(names) & set(environment)), None)

    def rank(self, number):
        """Wait until the process of a rank exists, and return its id."""
        return self.wait_for(lambda: self.find_rank(number))

    def alive(self):
        """Return the ids of this job's processes that are alive."""
        return sorted(processes(str(self.folder / "run.yaml")))

    def wait(self, limit_s=LIMIT_S):
        """Wait for the job's end and return its exit code; fail if a process of the job does not end."""
        wait_until(lambda: self.process.poll() is not None, self.text, limit_s)
        wait_until(lambda: not self.alive(), lambda: f"{self.alive()} are left: {self.text()}")
        return self.process.returncode

    def kill(self):
        """Kill all processes of the job at once, to simulate a power failure."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def assert_stopped(self, number):
        """Check that a signal stopped the run, and that its run directory is complete.

        number: the signal; None if rank 0 did not receive it. Even if all ranks receive it, rank 0 may get another
            rank's request to stop before its own signal.
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
