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


@pytest.mark.parametrize(
    ("name", "master", "expected"),
    [
        ("localhost.invalid", "", "192.0.2.7"),  # slurm.conf's NodeAddr
        ("localhost", "", "192.0.2.7"),  # a name that leads to the loopback interface of each host
        ("unknown", "192.0.2.9", "192.0.2.9"),
        ("192.0.2.5", "192.0.2.9", "192.0.2.5"),  # the host list's own name comes first
    ],
)
def test_a_name_that_leads_nowhere_has_the_address_of_slurm_or_of_the_job_script(tmp_path, name, master, expected):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\n[ "$3" = unknown ] || echo "NodeName=$3 Arch=x86_64 NodeAddr=192.0.2.7 State=IDLE"\n'
    )
    scontrol.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MASTER_ADDR": master}
    assert address(name, "SLURM_STEP_NODELIST", env) == expected
