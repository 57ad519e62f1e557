"""Each mistake ends in one message that names the key or place and the remedy, exit code 2, at once, nothing begun."""

import pytest
from error_cases import CASES, check, write
from helpers import fedmpi


def test_there_are_at_least_150_cases():
    assert len(CASES) >= 150


@pytest.mark.parametrize("label", CASES, ids=lambda label: label[:60])
def test_each_mistake_is_one_message(tmp_path, label):
    case = CASES[label]
    result = fedmpi("run", *write(case, tmp_path), cwd=tmp_path)
    check(case, result.returncode, result.stdout, result.stderr)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("label", ["trainn.lr=1", "anchor bomb", "csv: inf", "data.partition.clients=5000"])
def test_validate_reports_the_same_message(tmp_path, label):
    case = CASES[label]
    result = fedmpi("validate", *write(case, tmp_path), cwd=tmp_path)
    check(case, result.returncode, result.stdout, result.stderr)


def test_the_config_without_mistakes_is_valid(tmp_path):
    """Else the cases would fail for another reason."""
    case = CASES["rounds=-1"]._replace(overrides=())
    result = fedmpi("validate", *write(case, tmp_path), cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_sites_need_no_number_of_clients(tmp_path):
    case = CASES["csv: inf"]._replace(data="source: heart_disease, partition: {scheme: site}")
    arguments = write(case, tmp_path)
    path = tmp_path / "processed.va.data"
    path.write_text(path.read_text().replace("inf", "120"))
    result = fedmpi("validate", *arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("clients")] == ["4,"]
