"""Texts with a tokenizer give the same model on any number of ranks, by sites of one file and as silos."""

import json
import random

import pytest
from test_silos_on_ranks import run_on_one_and_three_ranks

pytest.importorskip("fedmpi.common.torchvision_compat")  # before transformers
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[PAD]", "[UNK]", "[EOS]", "good", "bad", "film", "plot"]
MODELS = """\
from torch import nn

class Reader(nn.Module):
    def __init__(self, outputs, per_token):
        super().__init__()
        self.embedding, self.head, self.per_token = nn.Embedding(7, 8), nn.Linear(8, outputs), per_token

    def forward(self, input_ids, attention_mask):
        z = self.embedding(input_ids) * attention_mask[..., None]
        return self.head(z if self.per_token else z.sum(1))

def classifier(input_shape, classes):
    return Reader(classes, False)

def writer(input_shape, classes):
    return Reader(classes, True)
"""
FORMS = {
    "sites": "path: all.csv, site_column: site, partition: {scheme: site}",
    "silos": "path: '{site}.csv', silos: [north, south]",
}
TASKS = {
    "classification": ("classifier", ", label_column: label, class_names: ['no', 'yes']"),
    "language_model": ("writer", ""),
}


@pytest.fixture
def folder(tmp_path):
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: k for k, w in enumerate(WORDS)}, unk_token="[UNK]"))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=whole, **names).save_pretrained(tmp_path / "tokenizer")
    draw = random.Random(0)
    rows = []
    for k in range(60):
        text = [draw.choice(WORDS[3:]) for _ in range(draw.randrange(1, 9))]
        rows.append((" ".join(text), "yes" if "good" in text else "no", ("north", "south")[k % 3 == 0]))
    for name in ("all", "north", "south"):
        own = [row for row in rows if name in ("all", row[2])]
        (tmp_path / f"{name}.csv").write_text("text,label,site\n" + "".join(",".join(row) + "\n" for row in own))
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path


@pytest.mark.parametrize(("form", "task"), [("sites", "classification"), ("silos", "language_model")])
def test_any_number_of_ranks_gives_the_same_model(folder, form, task):
    model, more = TASKS[task]
    runs = run_on_one_and_three_ranks(
        folder,
        f"data: {{source: tokenized_text, root: {folder}, tokenizer: tokenizer, max_length: 8, {FORMS[form]}{more}}}\n"
        f'model: {{name: "models.py:{model}"}}\ntask: {{name: {task}}}\nmethod: {{name: fedavg}}\n'
        "train: {batch_size: 8, lr: 0.1}\n",
    )
    digests = [json.loads((run / "identity.json").read_text())["(tokenizer)"] for run in runs]
    assert digests[0] == digests[1]
    file = "state/north/preprocessing.json" if form == "silos" else "preprocessing.json"
    assert (runs[0] / file).read_bytes() == (runs[1] / file).read_bytes()
