"""Every file in configs/ loads, and validates wherever its data are at hand; fragments on top of the quickstart.

A method's fragment is its section `method` alone: a config that changes one for another compares methods, not settings.
"""

import contextlib
import os
import re
from pathlib import Path

import pytest
import yaml
from helpers import ROOT

from fedmpi import config
from fedmpi.common.errors import MissingDataError, UserError
from fedmpi.data.transforms.pipeline import ImagePipeline
from fedmpi.methods import registry
from fedmpi.models.libraries import import_library
from fedmpi.runtime import build_data
from fedmpi.runtime.validate import validate_settings
from fedmpi.sweeps import expand
from fedmpi.sweeps import run_sweep as runs

CONFIGS = ROOT / "configs"
GENERATED_PATIENTS = str(CONFIGS / "benchmarks/small_data/generated_patients.py")
DATA = Path(os.environ.get("FEDMPI_DATA") or ROOT.parent / "shared" / "data")


def names(folder):
    return sorted(path.stem for path in (CONFIGS / folder).glob("*.yaml"))


def on_quickstart(tmp_path, *fragments):
    """Write a config that applies fragments to the quickstart."""
    path = tmp_path / "combined.yaml"
    path.write_text(yaml.safe_dump({"base": [str(CONFIGS / f"{name}.yaml") for name in ("quickstart", *fragments)]}))
    return path


def checked(path, *overrides):
    return valid(config.load(path, [f"data.root={DATA}", *overrides]))


def valid(settings):
    """Validate a config and return its settings; skip the test if the data are missing."""
    try:
        report = dict(validate_settings(settings))
    except UserError as error:
        if "correct data.root" not in str(error):  # what is said of files that are missing
            raise
        pytest.skip(str(error))
    assert report["result"] == "ok"
    return settings


@pytest.mark.parametrize("name", [*(name for name in names(".") if name != "five_methods"), "finetune/lora_base"])
def test_config(name):
    checked(CONFIGS / f"{name}.yaml")


def test_the_table_of_the_readme():
    """There are five methods with three seeds each, and everything random is the same for all methods."""
    messages = []
    asked = expand.load_sweep(CONFIGS / "five_methods.yaml")
    runs.validate_sweep(asked, messages.append)
    assert messages[0].startswith("15 runs")
    assert messages[-1] == "ok"
    for settings in (asked.run_settings(labels) for labels in asked.labels):
        same = asked.run_settings({"method": "fedavg", "seed": str(settings.seed)}).model_dump(mode="json")
        assert {**settings.model_dump(mode="json"), "name": "", "method": {}} == {**same, "name": "", "method": {}}


NEEDS = {  # what a method cannot do without, and says so
    "apfl": (r"plain SGD, but train\.momentum is 0\.9", "train.momentum: 0"),
    "pfedme": (r"plain SGD, but train\.momentum is 0\.9", "train.momentum: 0"),
    "fedfomo": (r"validation rows, but data\.validation is 0", "data.validation: 0.1"),
}


@pytest.mark.parametrize("name", names("methods"))
def test_method(tmp_path, name):
    path = on_quickstart(tmp_path, f"methods/{name}")
    results, remedy = NEEDS.get(name, ("", ""))
    if remedy:
        with pytest.raises(UserError, match=f"method {name} needs {results}; set {re.escape(remedy)}(, say)?$"):
            checked(path)
    settings = checked(path, *([remedy.replace(": ", "=")] if remedy else []))
    assert settings.method.name == name
    assert yaml.safe_load((CONFIGS / f"methods/{name}.yaml").read_text()).keys() == {"method"}


def test_every_method_has_its_fragment():
    assert names("methods") == sorted(registry)


@pytest.mark.parametrize("name", names("data"))
def test_data(tmp_path, name):
    silos = ["data.partition=null"] * name.endswith("silos")  # the quickstart's partition is the other way
    checked(on_quickstart(tmp_path, f"data/{name}"), "model.name=mlp", *silos)


@pytest.mark.parametrize("name", names("models"))
def test_model_of_a_library(name):
    """Each config has at most fifteen lines, and is valid if its library is installed."""
    import_library("torchvision", "")  # before other libraries that need it
    pytest.importorskip({"hf": "transformers"}.get(prefix := name.partition("_")[0], prefix))
    settings = checked(CONFIGS / f"models/{name}.yaml")
    assert settings.model.name.startswith(f"{prefix}:")
    assert len((CONFIGS / f"models/{name}.yaml").read_text().splitlines()) <= 15


@pytest.mark.parametrize("name", ["flamby_brca", "flamby_heart"])
def test_benchmark(name):
    """Every method of a table is validated with one of its seeds."""
    asked = expand.load_sweep(CONFIGS / "benchmarks" / f"{name}.yaml", [f"data.root={DATA}"])
    assert asked.published
    for labels in asked.covering_labels():
        if labels["seed"] == "42":
            valid(asked.run_settings(labels))


@pytest.mark.parametrize("name", names("campaigns"))
def test_campaign(tmp_path, name):
    """Every label of every axis is valid, except that the data of most labels are missing."""
    asked = expand.load_sweep(CONFIGS / "campaigns" / f"{name}.yaml", [f"data.root={tmp_path}"])
    output: list[str] = []
    with contextlib.suppress(MissingDataError):  # in which all that is wrong would be said before
        runs.validate_sweep(asked, output.append)
    assert output


PAPERS = [f"papers/{name}" for name in names("papers")] + [f"benchmarks/{name}" for name in names("benchmarks")]


@pytest.mark.parametrize("name", [name for name in PAPERS if not name.endswith("_small")])
def test_published(tmp_path, name):
    """Every label of every axis is valid, except that data are missing; a version on small data exists."""
    path = CONFIGS / f"{name}.yaml"
    asked = expand.load_sweep(path, [f"data.root={tmp_path}"])
    with pytest.raises(MissingDataError, match="no errors were found, except"):
        runs.validate_sweep(asked, lambda _: None)
    for settings in map(asked.run_settings, asked.covering_labels()):
        pipeline = ImagePipeline(bytes=True, channels=3, transforms=tuple(build_data.make_augmentations(settings)))
        assert pipeline.steps is not None
        assert pipeline.output_shape((3, 256, 256)) == pipeline.output_shape((3, 256, 256), training=True)
    assert path.read_text().startswith("# ")
    assert f"{name}_small" in PAPERS


@pytest.mark.parametrize("name", [name for name in PAPERS if name.endswith("_small")])
def test_a_published_table_on_small_data_is_valid(name):
    """Some runs of the file are validated on data that are always available."""
    small = expand.load_sweep(CONFIGS / f"{name}.yaml")
    every = [settings for _, settings in small.first_stage_runs()]
    made = name.startswith("benchmarks/flamby")
    assert {each.data.source.partition(":")[0] for each in every} == {GENERATED_PATIENTS if made else "digits"}
    assert max(each.rounds for each in every) <= (15 if made else 20)
    assert len(every) <= 12
    assert not small.published
    assert dict(validate_settings(every[0]))["result"] == "ok"
