"""Dataset accepts parts that fit together; its errors name the part and what is required."""

import pytest
import torch

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset, is_labels


def parts(**changes):
    valid = {
        "train_x": torch.zeros(4, 3),
        "train_y": torch.tensor([0, 1, 2, 0]),
        "test_x": torch.zeros(2, 3),
        "test_y": torch.tensor([2, 1]),
        "classes": 3,
    }
    return {**valid, **changes}


def test_valid_parts_are_accepted():
    assert Dataset(**parts()).input_shape == (3,)
    assert Dataset(**parts(test_x=torch.zeros(0, 3), test_y=torch.zeros(0, dtype=torch.int64))).classes == 3


@pytest.mark.parametrize(
    ("train_y", "test_y", "classes"),
    [
        (torch.rand(4, 2), torch.rand(2, 2), 1),
        (torch.rand(4, 3), torch.rand(2, 3), 3),
        (torch.rand(4, 3) > 0.5, torch.rand(2, 3) > 0.5, 3),
        (
            torch.randint(-100, 9, (4, 5, 6)),
            torch.randint(0, 9, (2, 5, 6)),
            9,
        ),  # the task decides which targets are ignored
        (torch.tensor([7, 0, 12, 3]), torch.tensor([1, 40]), 1),  # counts
    ],
)
def test_targets_may_have_any_shape(train_y, test_y, classes):
    data = Dataset(**parts(train_y=train_y, test_y=test_y, classes=classes))
    assert not is_labels(data.train_y, data.classes)
    data = Dataset(**parts())
    assert is_labels(data.train_y, data.classes)


def several_tensors(rows, tokens=5, **changes):
    return {"ids": torch.zeros(rows, tokens).long(), "mask": torch.ones(rows, tokens) > 0, **changes}


def test_samples_may_consist_of_several_tensors():
    data = Dataset(**parts(train_x=several_tensors(4), test_x=several_tensors(2)))
    assert data.input_shape == {"ids": (5,), "mask": (5,)}
    assert data.train_x["ids"].shape == (4, 5)
    assert len(data.test_x) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_x": torch.zeros(5, 3)}, "train_x has 5 rows"),
        (
            {"train_x": several_tensors(4, ids=torch.zeros(3, 5).long()), "test_x": several_tensors(2)},
            r"train_x\['ids'\] has 3 rows",
        ),
        (
            {"train_x": several_tensors(4, f=torch.full((4, 1), torch.inf)), "test_x": several_tensors(2)},
            r"train_x\['f'\] .* in row 0",
        ),
        ({"train_x": torch.zeros(4, 3).int(), "test_x": torch.zeros(2, 3).int()}, r"train_x\.long\(\) for symbols"),
        (
            {"train_y": torch.zeros(4, 2), "test_y": torch.zeros(2)},
            r"train_y is \(2,\) float32, but a row of test_y is \(\)",
        ),
        (
            {"train_y": torch.tensor([[0.0], [1], [torch.inf], [2]])},
            "train_y contains infinite targets, first in row 2",
        ),
        (
            {"train_y": torch.tensor([0, 1, 3, 0])},
            r"labels from 0 to 3, but with classes=3 they must be from 0 to 2; .* in row 2",
        ),
        (
            {"train_x": torch.tensor([[0.0] * 3] * 2 + [[0.0, float("nan"), 0.0]] * 2)},
            r"not finite \(nan or inf\), first in row 2",
        ),
        ({"classes": 0}, "classes is 0"),
        ({"site": torch.tensor([0, 1])}, r"int64 of shape \(4,\), one number per row"),
        (
            {"site": torch.tensor([0, 1, 2, 0]), "site_names": ("a", "b")},
            r"numbers from 0 to 2; must be from 0 to 1, the numbers of the sites",
        ),
    ],
)
def test_parts_that_do_not_fit_are_errors(changes, message):
    with pytest.raises(UserError, match=message):
        Dataset(**parts(**changes))
