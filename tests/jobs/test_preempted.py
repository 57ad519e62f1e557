"""A run that is preempted again and again: the bits of the undisturbed one, each round once."""

import random
import signal
import time

import pytest
from real_job import AGAIN, PARTIAL, Job, assert_same, processes, undisturbed


def preempt(folder, times, seed):
    """Stop an endless run at a random time after a random number of its rounds, `times` times; then let it end.

    Returns the job, and the number of rounds at its end.
    """
    chance, job = random.Random(seed), None
    for _ in range(times):
        if job is None:
            job = Job(folder, "script mpirun", 3, checkpoint={"resume": "auto"}, **PARTIAL)
        else:
            job.start()
        # One in four in the start, before any round; the others some rounds later, anywhere in one.
        more = 0 if chance.random() < 0.25 else chance.randint(1, 4)
        if more:
            job.wait_for_rounds(len(job.rows()) + more)
        else:
            job.wait_for(lambda job=job: processes(str(folder / "run.yaml"), "OMPI_COMM_WORLD_RANK="))
        time.sleep(chance.random() * (0.2 if more else 4))
        job.process.send_signal(chance.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]))
        assert job.wait() == AGAIN, job.text()
    rounds = len(job.rows()) + 3
    job.start(f"rounds={rounds}")
    assert job.wait() == 0, job.text()
    return job, rounds


@pytest.mark.parametrize("times", [pytest.param(3, marks=pytest.mark.smoke), pytest.param(20, marks=pytest.mark.soak)])
def test_preemptions(tmp_path, times):
    job, rounds = preempt(tmp_path / "torn", times, 0 if times == 3 else random.randrange(10**6))
    assert job.text().count("stopped early") <= times
    assert "Traceback" not in job.text()
    assert_same(job.run, undisturbed(job, rounds))
