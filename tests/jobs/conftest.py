"""Jobs of real processes, which end with the test that started them."""

import pytest
from real_job import Job


@pytest.fixture
def start(tmp_path):
    """Return a function that starts jobs; see Job."""
    jobs = []

    def start(kind="alone", size=1, folder=None, **changes):
        jobs.append(Job(folder or tmp_path / f"job{len(jobs)}", kind, size, **changes))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
