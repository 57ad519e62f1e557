"""Models of other libraries give the same bits in one process and on three ranks; their weights are compared."""

import csv
import random

import pytest
import torch
from helpers import ROOT
from real_job import hashes, succeed
from safetensors.torch import save_file
from test_late_errors import mpirun_with_configs

from fedmpi.models.libraries import import_library

PACKAGES = {"hf": "transformers"}


WORDS = ["[PAD]", "[UNK]", "[EOS]", "good", "bad", "film", "plot"]


def write_texts(folder):
    """Write texts of two sites, and a tokenizer that knows their words."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: k for k, w in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder / "tokenizer")
    draw = random.Random(0)
    with (folder / "texts.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label", "site"])
        for k in range(90):
            text = [draw.choice(WORDS[3:]) for _ in range(draw.randrange(1, 9))]
            rows.writerow([" ".join(text), "yes" if "good" in text else "no", ("north", "south")[k % 3 == 0]])


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs/models").glob("*.yaml")))
def test_a_run_has_the_same_bits_in_one_process_and_on_three_ranks(name, tmp_path):
    prefix = name.partition("_")[0]
    import_library("torchvision", "")  # before other libraries that need it
    pytest.importorskip(PACKAGES.get(prefix, prefix))
    texts = []
    if prefix == "hf":
        write_texts(tmp_path)
        texts = [f"data.root={tmp_path}", f"data.tokenizer={tmp_path}/tokenizer"]

    def models(run, **start):
        words = (f"output={tmp_path}", *texts, f"name={run}", "rounds=2", "report=false")
        succeed("run", str(ROOT / f"configs/models/{name}.yaml"), *words, limit_s=600, **start)
        return hashes(tmp_path / run)

    alone = models("alone")
    assert len(set(alone)) == 2  # both rounds have changed the model
    assert models("three", kind="mpirun", size=3) == alone


def test_ranks_with_other_pretrained_weights_are_named(tmp_path):
    """The path may differ between ranks, but not the content."""
    paths = []
    for rank, value in enumerate((0.0, 1.0, 0.0)):
        weights = {"head.weight": torch.full((10, 64), value), "head.bias": torch.zeros(10)}
        save_file(weights, tmp_path / f"w{rank}.safetensors")
        text = f"""\
name: run
output: {tmp_path}
rounds: 1
data: {{source: digits, partition: {{scheme: iid, clients: 4}}}}
model: {{name: logistic, pretrained: {tmp_path}/w{rank}.safetensors}}
method: {{name: fedavg}}
comm: {{backend: mpi}}
"""
        paths.append(tmp_path / f"{rank}.yaml")
        paths[-1].write_text(text)
    done = mpirun_with_configs(tmp_path, *paths)
    assert done.returncode == 2
    assert done.stderr.count("error: the ranks do not run the same experiment") == 1
    assert "rank 1 differs from rank 0 in the weight files of model.pretrained." in done.stderr
    done = mpirun_with_configs(tmp_path, paths[0], paths[2], paths[0])
    assert done.returncode == 0, done.stderr
    assert "2 of 2 tensors of the model are loaded from" in done.stdout
