"""Samples of one group, such as the images of a patient, are never divided between training and held-out parts."""

import pytest
import torch
from test_csv_images import GREY, greys, write

from fedmpi.common.errors import UserError
from fedmpi.data.dataset import Dataset
from fedmpi.data.federated import hold_out_validation, split
from fedmpi.data.sources.images.class_images import csv_images
from fedmpi.data.sources.tables.table_source import table


def dataset(group, site=None):
    n = len(group)
    x, y = torch.arange(float(n))[:, None], torch.arange(n) % 2
    return Dataset(x, y, x, y, 2, group=torch.tensor(group), site=site)


@pytest.mark.parametrize(
    ("group", "fraction", "sizes"),
    [
        # 6 samples are to be held out: a group is added if this brings the number closer to 6
        ([*[0] * 10, *[1] * 5, *[2] * 5, *range(3, 13)], 0.2, {6, 7, 8, 10}),
        ([*[0] * 90, *(1 + i // 2 for i in range(10))], 0.1, {10}),  # the large group remains for training
        ([*[0] * 9, *[1] * 8, *[2] * 7], 0.05, {7}),  # all groups are too large: the smallest is held out
    ],
)
def test_entire_groups_are_held_out(group, fraction, sizes):
    """A group is added if it brings the number of samples closer to the fraction."""
    numbers = set()
    for seed in range(20):
        data = hold_out_validation(split(dataset(group), "iid", 1, 0), fraction, seed)
        inside, outside = ({group[i] for i in part[0].index.tolist()} for part in (data.validation, data.train))
        assert not inside & outside
        assert len(data.validation[0]) + len(data.train[0]) == len(group)
        assert data.validation_sizes.tolist() == [len(data.validation[0])]
        assert data.train_sizes.tolist() == [len(data.train[0])]
        assert data.label_counts.sum() == len(data.train[0])
        numbers.add(len(data.validation[0]))
    assert numbers <= sizes
    assert len(numbers) > 1 or len(sizes) == 1


def test_a_client_with_one_group_keeps_all_samples_for_training():
    data = split(dataset([0, 0, 0, 1, 2, 2], site=torch.tensor([0, 0, 0, 1, 1, 1])), "site", None, 0)
    with pytest.warns(
        UserWarning,
        match=r"data\.validation holds out no rows of clients \[0\], because all rows .* a single group",
    ):
        data = hold_out_validation(data, 0.5, 0)
    assert data.validation_sizes.tolist() == [0, data.validation_sizes[1]]
    assert 0 < data.validation_sizes[1] < 3


def patient(i):
    return f"p{i // 3}"


def test_images_of_a_patient_are_in_one_part(tmp_path):
    rows = [f"{i}.png,{('cat', 'dog')[i % 2]},{'uk' if i < 9 else 'at'},{patient(i)}" for i in range(20)]
    write(tmp_path, header="path,label,site,who", rows=rows)
    data = csv_images(tmp_path, path="a.csv", site_column="site", group_column="who", test_fraction=0.4, **GREY)
    train, test = ([patient(i) for i in greys(x)] for x in (data.train_x, data.test_x))
    assert not set(train) & set(test)
    assert (len(train), len(test)) == (len(data.group), 20 - len(data.group))
    pairs = {*zip(train, data.group.tolist(), strict=True)}
    assert len(pairs) == len({*train}) == len({*data.group.tolist()})
    fed = hold_out_validation(split(data, "site", None, 0), 0.3, 0)
    for k in range(2):
        inside, outside = ({int(data.group[i]) for i in part[k].index} for part in (fed.validation, fed.train))
        assert inside
        assert outside
        assert not inside & outside


def test_table_rows_of_a_patient_are_in_one_part(tmp_path):
    rows = [f"{i},{i % 2},{patient(i)}" for i in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["age,sick,who", *rows, ""]))
    data = table(tmp_path, path="a.csv", label_column="sick", group_column="who", standardise="none")
    assert data.input_and_class_names == ("age", "->", "0", "1")
    train, test = ({patient(int(age)) for age in x[:, 0]} for x in (data.train_x, data.test_x))
    assert not train & test
    assert (len(data.test_y), len(data.group.unique()), len(train)) == (12, 16, 16)
    (tmp_path / "b.csv").write_text("age,sick,who,part,at\n1,0,a,train,uk\n2,1,a,test,at\n3,1,b,train,at\n")
    options = {"label_column": "sick", "group_column": "who", "split_column": "part", "site_column": "at"}
    with pytest.raises(
        UserError, match=r"b\.csv, line 3: rows of group 'a' \(data\.group_column\) must .*line 2 is in"
    ):
        table(tmp_path, path="b.csv", **options)  # also if the two parts are at two sites
