"""`cohort.size`: a round has a number of clients, in place of a share of them."""

import pytest
from helpers import ROOT, fedmpi, prepare, settings

from fedmpi import config
from fedmpi.common.errors import UserError
from fedmpi.engine import scheduler


def loaded(tmp_path, cohort, *overrides):
    path = tmp_path / "run.yaml"
    data = "data: {source: digits, partition: {scheme: iid, clients: 20}}"
    path.write_text(f"{data}\nmodel: {{name: mlp}}\nmethod: {{name: fedavg}}\ncohort: {cohort}\n")
    return config.load(path, overrides)


def test_fraction_and_size_exclude_each_other(tmp_path):
    assert (loaded(tmp_path, "{}").cohort.fraction, loaded(tmp_path, "{}").cohort.size) == (1.0, None)
    sized = loaded(tmp_path, "{size: 5}").cohort
    assert (sized.fraction, sized.size) == (None, 5)
    for cohort, overrides in (("{size: 5, fraction: 0.5}", []), ("{fraction: 0.5}", ["cohort.size=5"])):
        with pytest.raises(UserError, match=r"size: 5, fraction: 0\.5; give one of them, and set the other to null"):
            loaded(tmp_path, cohort, *overrides)
    both = loaded(tmp_path, "{fraction: 0.5}", "cohort.size=5", "cohort.fraction=null").cohort
    assert (both.fraction, both.size) == (None, 5)
    with pytest.raises(UserError, match="give one of them"):
        loaded(tmp_path, "{fraction: null}")
    for wrong in ("0", "-1", "2.5", "all"):
        with pytest.raises(UserError, match=r"cohort\.size: .* is not allowed"):
            loaded(tmp_path, f"{{size: {wrong}}}")


@pytest.mark.parametrize("draw", ["uniform", "cycles"])
def test_a_size_draws_what_the_fraction_of_that_size_draws(draw):
    for clients, members in ((20, 8), (7, 1), (9, 9)):
        for t in range(2 * clients):
            one = scheduler.draw_cohort(3, t, clients, members / clients, draw)
            assert scheduler.draw_cohort(3, t, clients, None, draw, members) == one
            assert draw == "cycles" or len(one) == members


def test_more_clients_than_there_are_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"cohort\.size: 8 clients a round, but there are 7; set it to at most 7"):
        prepare(settings(cohort={"fraction": None, "size": 8}))
    prepare(settings(cohort={"fraction": None, "size": 7}))
    done = fedmpi("validate", ROOT / "configs/quickstart.yaml", "cohort.fraction=null", "cohort.size=5")
    assert done.returncode == 2
    assert "command line: cohort.size=5: cohort.size: 5 clients a round, but there are 4" in done.stderr
    assert "Traceback" not in done.stderr
