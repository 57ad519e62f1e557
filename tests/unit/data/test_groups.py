"""Samples that belong together, such as the pictures of a patient, are on one side of each part that is held out."""

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
        # of 6 wanted: a group is taken where without it they would be further away
        ([*[0] * 10, *[1] * 5, *[2] * 5, *range(3, 13)], 0.2, {6, 7, 8, 10}),
        ([*[0] * 90, *(1 + i // 2 for i in range(10))], 0.1, {10}),  # the large group stays for training
        ([*[0] * 9, *[1] * 8, *[2] * 7], 0.05, {7}),  # of large groups the smallest
    ],
)
def test_whole_groups_are_held_out(group, fraction, sizes):
    """Each that brings their number of samples nearer to the wanted one."""
    found = set()
    for seed in range(20):
        held = hold_out_validation(split(dataset(group), "iid", 1, 0), fraction, seed)
        inside, outside = ({group[i] for i in part[0].index.tolist()} for part in (held.validation, held.train))
        assert not inside & outside
        assert len(held.validation[0]) + len(held.train[0]) == len(group)
        assert held.validation_sizes.tolist() == [len(held.validation[0])]
        assert held.train_sizes.tolist() == [len(held.train[0])]
        assert held.label_counts.sum() == len(held.train[0])
        found.add(len(held.validation[0]))
    assert found <= sizes
    assert len(found) > 1 or len(sizes) == 1


def test_a_client_of_one_group_trains_on_all_of_it():
    data = split(dataset([0, 0, 0, 1, 2, 2], site=torch.tensor([0, 0, 0, 1, 1, 1])), "site", None, 0)
    with pytest.warns(
        UserWarning,
        match=r"data\.validation holds out no rows of clients \[0\]: all rows of these clients belong to one",
    ):
        held = hold_out_validation(data, 0.5, 0)
    assert held.validation_sizes.tolist() == [0, held.validation_sizes[1]]
    assert 0 < held.validation_sizes[1] < 3


def people(i):
    return f"p{i // 3}"


def test_pictures_of_a_patient_are_on_one_side(tmp_path):
    rows = [f"{i}.png,{('cat', 'dog')[i % 2]},{'uk' if i < 9 else 'at'},{people(i)}" for i in range(20)]
    write(tmp_path, header="path,label,site,who", rows=rows)
    data = csv_images(tmp_path, path="a.csv", site_column="site", group_column="who", test_fraction=0.4, **GREY)
    train, test = ([people(i) for i in greys(x)] for x in (data.train_x, data.test_x))
    assert not set(train) & set(test)
    assert (len(train), len(test)) == (len(data.group), 20 - len(data.group))
    pairs = {*zip(train, data.group.tolist(), strict=True)}
    assert len(pairs) == len({*train}) == len({*data.group.tolist()})
    held = hold_out_validation(split(data, "site", None, 0), 0.3, 0)
    for k in range(2):
        inside, outside = ({int(data.group[i]) for i in part[k].index} for part in (held.validation, held.train))
        assert inside
        assert outside
        assert not inside & outside


def test_rows_of_a_patient_in_a_table_are_on_one_side(tmp_path):
    rows = [f"{i},{i % 2},{people(i)}" for i in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["age,sick,who", *rows, ""]))
    data = table(tmp_path, path="a.csv", label_column="sick", group_column="who", standardise="none")
    assert data.input_and_class_names == ("age", "->", "0", "1")
    train, test = ({people(int(age)) for age in x[:, 0]} for x in (data.train_x, data.test_x))
    assert not train & test
    assert (len(data.test_y), len(data.group.unique()), len(train)) == (12, 16, 16)
    (tmp_path / "b.csv").write_text("age,sick,who,part,at\n1,0,a,train,uk\n2,1,a,test,at\n3,1,b,train,at\n")
    options = {"label_column": "sick", "group_column": "who", "split_column": "part", "site_column": "at"}
    with pytest.raises(
        UserError, match=r"b\.csv, line 3: rows of group 'a' \(data\.group_column\) must .*line 2 is in"
    ):
        table(tmp_path, path="b.csv", **options)  # also where its two parts lie at two sites
