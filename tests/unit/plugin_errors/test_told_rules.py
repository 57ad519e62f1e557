"""What a server rule raises or returns is told: its line, what was expected, what came."""

import pytest
import torch
from plugin_play import check_told, play

from fedmpi.common.errors import UserError


def rule_none(up, s):
    return None


def rule_one(up, s):
    return up.mean("dw")[:1]


def rule_rows(up, s):
    return up.dw


def rule_whole_numbers(up, s):
    return torch.ones_like(up.mean("dw"), dtype=torch.int64)


def rule_numpy(up, s):
    return up.mean("dw").numpy()


def rule_complex(up, s):
    return up.mean("dw") + 0j


def rule_sparse(up, s):
    return up.mean("dw").to_sparse()


def rule_meta(up, s):
    return up.mean("dw").to("meta")


def rule_writes(up, s):
    return up.dw.mul_(2).mean(0)


def rule_exits(up, s):
    raise SystemExit(0)


TOLD = [
    # plug-in, what the message says
    (rule_none, r"round 0: the server rule returned NoneType; it must return a tensor \(26,\) of floats"),
    (rule_one, r"returned shape \(1,\); it must return a tensor \(26,\)"),
    (rule_rows, r"returned shape \(3, 26\)"),
    (rule_whole_numbers, "returned a tensor of torch.int64"),
    (rule_numpy, "returned ndarray"),
    (rule_complex, "returned a tensor of torch.complex64"),
    (rule_sparse, "returned a sparse_coo tensor"),
    (rule_meta, "returned a tensor on meta"),
    (rule_writes, "the server rule wrote to up, which hooks may only read"),
    (rule_exits, "round 0: rule_exits at .*SystemExit"),
]


@pytest.mark.parametrize(("thing", "message"), TOLD, ids=[case[0].__name__ for case in TOLD])
def test_told(thing, message):
    """One UserError: what is expected, what came, and a line of the plug-in itself."""
    check_told("rule", thing, message)


def test_a_rule_for_some_groups_is_checked_there():
    """One number was spread over the group."""
    with pytest.raises(
        UserError, match=r"server.rule for the groups head returned \(1,\); it must return a tensor \(10,"
    ):
        play(server={"rule": {"name": f"{__file__}:rule_one", "groups": ["head"]}})
