"""`fedmpi validate` names each site, with its samples by class or its events."""

import pytest

from fedmpi.config.schema import Settings
from fedmpi.runtime.validate import validate_settings

# At north 7 are well and 3 ill, at south 3 are well and 7 ill. A fifth of each class of each site, rounded, is the
# test part: of 7 round(1.4) = 1, of 3 round(0.6) = 1.
ROWS = [
    f"{site},{k}.5,{'ill' if k % 10 >= limit else 'well'},{int(k % 10 >= limit)},{k + 1}"
    for site, limit in (("north", 7), ("south", 3))
    for k in range(10)
]


def sections(root, **data):
    (root / "a.csv").write_text("\n".join(["hospital,age,state,event,time", *ROWS]) + "\n")
    data = {"source": "table", "path": "a.csv", "root": root, "site_column": "hospital", **data}
    return {
        "data": {**data, "partition": {"scheme": "site"}},
        "model": {"name": "logistic"},
        "method": {"name": "fedavg"},
        "rounds": 1,
    }


@pytest.mark.filterwarnings("ignore:data. feature 'age' alone separates")
def test_classes_of_each_site(tmp_path):
    settings = sections(tmp_path, label_column="state", features=["age"])
    rows = dict(validate_settings(Settings.model_validate(settings)))
    assert {name: text for name, text in rows.items() if name.startswith("site ")} == {
        "site north": "8 training samples (ill: 2, well: 6), 2 test samples (ill: 1, well: 1)",
        "site south": "8 training samples (ill: 6, well: 2), 2 test samples (ill: 1, well: 1)",
    }


@pytest.mark.filterwarnings("ignore:data. feature 'age' alone separates")
def test_events_of_each_site(tmp_path):
    """The test part is drawn whatever the events: those of both parts are 3 at north and 7 at south."""
    settings = sections(tmp_path, label_column=["event", "time"], features=["age"])
    rows = dict(validate_settings(Settings.model_validate({**settings, "task": {"name": "survival"}})))
    for site, events in (("north", 3), ("south", 7)):
        text = rows[f"site {site}"].replace("1 event)", "1 events)")
        train, test = (int(part.split(" events")[0].rsplit("(")[-1]) for part in text.split(", "))
        assert text == f"8 training samples ({train} events), 2 test samples ({test} events)"
        assert train + test == events


@pytest.mark.filterwarnings("ignore:data. feature 'age' alone separates")
def test_an_empty_test_part_of_a_split_column_has_a_remedy(tmp_path):
    settings = sections(tmp_path, label_column="state", features=["age"], split_column="part")
    part = ["part", *["train", "validation"] * 10]
    lines = (tmp_path / "a.csv").read_text().splitlines()
    (tmp_path / "a.csv").write_text("\n".join(f"{a},{b}" for a, b in zip(lines, part, strict=True)) + "\n")
    with pytest.warns(UserWarning, match=r"the test set is empty.*no row is part: test.*data\.test_fraction"):
        rows = dict(validate_settings(Settings.model_validate(settings)))
    assert rows["test"].startswith("0 samples;")
