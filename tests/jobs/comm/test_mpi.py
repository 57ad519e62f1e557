"""MPI that is not there, or not the launcher's."""

import os
import sys
from contextlib import suppress

import pytest

from fedmpi.comm.backends import mpi
from fedmpi.common.errors import UserError


def test_missing_mpi4py_is_said_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UserError, match=r"pip install 'fedmpi\[mpi\]'"):
        mpi.load()


@pytest.mark.parametrize(
    ("under_mpirun", "asked", "becomes"), [(True, None, "^ofi"), (True, "self,tcp", "self,tcp"), (False, None, None)]
)
def test_mpi_init_does_not_sleep_in_btl_ofi_and_a_users_choice_stands(monkeypatch, under_mpirun, asked, becomes):
    pytest.importorskip("mpi4py")
    monkeypatch.setattr(os, "environ", {"PRTE_LAUNCHED": "1"} if under_mpirun else {})
    if asked:
        os.environ[mpi.NO_SLEEP[0]] = asked
    with suppress(UserError):  # where no MPI is found
        mpi.load()
    assert os.environ.get(mpi.NO_SLEEP[0]) == becomes


def test_another_mpi_than_the_launchers_is_said_with_the_remedy(ranks):
    """The launcher says 5; MPI, started by nobody it knows, is alone."""
    pytest.importorskip("mpi4py")
    env = {"PMI_RANK": "0", "PMI_SIZE": "5", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "5"}
    outcome = ranks.start("battery.py", envs=[env], backend="mpi")
    assert outcome.codes == [1]
    assert "UserError: mpi started 5 ranks, but MPI sees 1" in outcome.text
    assert "Start with the mpirun of that MPI" in outcome.text


def test_mpi_under_torchrun_is_said_with_the_remedy(ranks):
    pytest.importorskip("mpi4py")
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    outcome = ranks.start("battery.py", envs=[env], backend="mpi")
    assert outcome.codes == [1]
    assert "comm.backend=mpi needs mpirun" in outcome.text
