"""Preparations before MPI starts."""

import os
import sys
from contextlib import suppress

import pytest

from fedmpi.comm.backends import mpi
from fedmpi.common.errors import UserError


def test_missing_mpi4py_is_an_error_with_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UserError, match=r"pip install 'fedmpi\[mpi\]'"):
        mpi.import_mpi()


@pytest.mark.parametrize(
    ("under_mpirun", "asked", "becomes"), [(True, None, "^ofi"), (True, "self,tcp", "self,tcp"), (False, None, None)]
)
def test_btl_ofi_is_excluded_unless_the_user_has_set_it(monkeypatch, under_mpirun, asked, becomes):
    pytest.importorskip("mpi4py")
    monkeypatch.setattr(os, "environ", {"PRTE_LAUNCHED": "1"} if under_mpirun else {})
    if asked:
        os.environ[mpi.EXCLUDE_OFI[0]] = asked
    with suppress(UserError):  # where no MPI is found
        mpi.import_mpi()
    assert os.environ.get(mpi.EXCLUDE_OFI[0]) == becomes
