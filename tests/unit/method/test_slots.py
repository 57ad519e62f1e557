"""Declared slots: shapes from letters, packing without gaps, and views that cannot be rebound."""

import pytest
import torch

from fedmpi.flat.packing import Packing
from fedmpi.method.slots import FLAT, HEAD_FLAT, INITIAL, PER_CLASS, PROTOTYPES, SCALAR, SHARED, Slot, Slots

SIZES = {"d": 12, "s": 9, "h": 3, "b": 2, "c": 4, "z": 5, "N": 7}


def test_shapes_follow_from_the_letters():
    slots = Slots(a=FLAT, b=SHARED, c=HEAD_FLAT, e=PER_CLASS, f=PROTOTYPES, g=SCALAR, heads=Slot(("N", "h")), v=INITIAL)
    packing = slots.to_packing(SIZES)
    assert packing.shapes == {
        "a": (12,), "b": (9,), "c": (3,), "e": (4,), "f": (4, 5), "g": (), "heads": (7, 3), "v": (12,)
    }  # fmt: skip
    assert packing.size == 12 + 9 + 3 + 4 + 20 + 1 + 21 + 12
    assert list(slots) == list(packing.spans)  # in the order of declaration, without gaps
    ends = [packing.spans[name] for name in slots]
    assert [a for a, _ in ends] == [0, *(b for _, b in ends[:-1])]


@pytest.mark.parametrize("m", [1, 4])
def test_views_of_several_rows_share_their_memory(m):
    """This also holds if the rows are a part of longer rows; a scalar slot is (m,)."""
    packing = Packing({"x": (2, 3), "y": (), "empty": (0,), "z": (2,)})
    rows = torch.arange(11.0 * m).view(m, 11)[:, 1:10]
    views = packing.views(rows)
    assert (views.x.shape, views.y.shape, views.empty.shape, views.z.shape) == ((m, 2, 3), (m,), (m, 0), (m, 2))
    for i in range(m):
        assert torch.equal(views.x[i], packing.views(rows[i].contiguous()).x)
        assert views.y[i] == rows[i, 6]
    views.x.zero_()  # views alias the rows
    assert not rows[:, :6].any()


def test_values_that_were_written_are_read_back():
    packing = Packing({"x": (2, 3), "y": (), "z": (2,)})
    row = torch.full((9,), 7.0)
    packing.write(row, {"x": torch.arange(6.0).view(2, 3).T.contiguous().T, "y": 3.5})
    assert row.tolist() == [0, 1, 2, 3, 4, 5, 3.5, 7, 7]  # z was not named and stays


@pytest.mark.parametrize(("size", "value"), [(5, torch.zeros(2)), (5, torch.zeros(3, 1)), (4, torch.zeros(3))])
def test_values_of_a_wrong_size_are_rejected(size, value):
    """The cases are too few entries, the right number in a wrong shape, and a row that is too short."""
    packing = Packing({"x": (3,), "y": (2,)})
    with pytest.raises(ValueError, match=r"slot '[xy]' has shape"):
        packing.write(torch.zeros(size), {"x": value, "y": torch.zeros(2 if size == 5 else 3)})
    with pytest.raises(KeyError):
        packing.write(torch.zeros(5), {"w": torch.zeros(3)})
