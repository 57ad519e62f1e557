"""An MPI library that does not belong to the launcher is reported."""

import pytest


def test_the_mpi_of_another_launcher_is_an_error_with_a_remedy(ranks):
    """The launcher's variables say 5 ranks, but MPI has a single one."""
    pytest.importorskip("mpi4py")
    env = {"PMI_RANK": "0", "PMI_SIZE": "5", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "5"}
    outcome = ranks.start("battery.py", envs=[env], backend="mpi")
    assert outcome.codes == [1]
    assert "UserError: mpi started 5 ranks, but MPI sees 1" in outcome.text
    assert "Start with the mpirun of that MPI" in outcome.text


@pytest.mark.smoke
def test_mpi_under_torchrun_is_an_error_with_a_remedy(ranks):
    pytest.importorskip("mpi4py")
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    outcome = ranks.start("battery.py", envs=[env], backend="mpi")
    assert outcome.codes == [1]
    assert "comm.backend: mpi needs mpirun" in outcome.text
