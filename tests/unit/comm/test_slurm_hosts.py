import pytest

from fedmpi.comm.launchers.slurm_hosts import address, expand
from fedmpi.common.errors import UserError


@pytest.mark.parametrize(
    ("hostlist", "hosts"),
    [
        ("vm", ["vm"]),
        ("a,b-1,c.example.org", ["a", "b-1", "c.example.org"]),
        ("a[01-03,7],b2", ["a01", "a02", "a03", "a7", "b2"]),
        ("gnode[10,20,25]", ["gnode10", "gnode20", "gnode25"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]x", ["n098x", "n099x", "n100x", "n101x"]),
        ("r[1-2]n[1-2],login", ["r1n1", "r1n2", "r2n1", "r2n2", "login"]),
    ],
)
def test_expand(hostlist, hosts):
    assert expand(hostlist) == hosts


@pytest.mark.parametrize("hostlist", ["", "a[1-3", "a[1-x]", "a,,b", "a]"])
def test_malformed_lists_are_refused(hostlist):
    with pytest.raises(UserError, match="host list"):
        expand(hostlist)


def test_a_host_that_does_not_resolve_is_named_with_its_source():
    with pytest.raises(
        UserError, match=r"'no-such-host.invalid' \(rank 0's, from SLURM_STEP_NODELIST\) does not resolve"
    ):
        address("no-such-host.invalid", "SLURM_STEP_NODELIST", {})
