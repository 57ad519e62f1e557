"""Each mistake ends in one message that names the key or place and the remedy, exit code 2, at once, nothing begun."""

import pytest
from error_cases import CASES, check, write
from helpers import fedmpi


def test_there_are_enough():
    assert len(CASES) >= 150


@pytest.mark.parametrize("label", CASES, ids=lambda label: label[:60])
def test_the_main_job_in_one_process(tmp_path, label):
    case = CASES[label]
    done = fedmpi("run", *write(case, tmp_path), cwd=tmp_path)
    check(case, done.returncode, done.stdout, done.stderr)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("label", ["trainn.lr=1", "anchor bomb", "csv: inf", "data.partition.clients=5000"])
def test_validate_says_the_same(tmp_path, label):
    case = CASES[label]
    done = fedmpi("validate", *write(case, tmp_path), cwd=tmp_path)
    check(case, done.returncode, done.stdout, done.stderr)


def test_the_config_itself_is_sound(tmp_path):
    """Else the cases would fail for another reason."""
    case = CASES["rounds=-1"]._replace(overrides=())
    done = fedmpi("validate", *write(case, tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_sites_need_no_number_of_clients(tmp_path):
    case = CASES["csv: inf"]._replace(data="source: heart_disease, partition: {scheme: site}")
    arguments = write(case, tmp_path)
    path = tmp_path / "processed.va.data"
    path.write_text(path.read_text().replace("inf", "120"))
    done = fedmpi("validate", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("clients")] == ["4,"]
