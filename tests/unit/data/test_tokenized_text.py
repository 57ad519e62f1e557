"""The source `tokenized_text`: tokens of texts with labels, and samples of a language model."""

import csv
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import fedmpi as package
from fedmpi import config
from fedmpi.common.errors import UserError
from fedmpi.data.silos import build_silo_federation, count_local_labels, describe_silos, open_silos
from fedmpi.data.sources.tables.tokenized_text import tokenized_text
from fedmpi.runtime.execute import execute_run

pytest.importorskip("fedmpi.common.torchvision_compat")  # before transformers
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

PAD, UNK, EOS, CLS, SEP = range(5)
WORDS = ["[PAD]", "[UNK]", "[EOS]", "[CLS]", "[SEP]", "a", "bad", "film", "good", "plot", "the"]
TEXTS = ["good film", "a bad film", "the plot", "", "the bad plot a film the end", "good good"]
LABELS = ["yes", "no", "yes", "no", "no", "yes"]
SITES = ["north", "north", "south", "south", "south", "north"]
PARTS = ["train", "train", "train", "val", "train", "test"]


def save_tokenizer(folder, special=True, words=WORDS, **options):
    """Save a tokenizer that splits texts at blanks; `special` adds [CLS] and [SEP] as BERT does."""
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: k for k, w in enumerate(words)}, unk_token="[UNK]"))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if special:
        whole.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
        )
    options = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]", **options}
    transformers.PreTrainedTokenizerFast(tokenizer_object=whole, **options).save_pretrained(folder)
    return folder


def write(path, **columns):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def root(tmp_path):
    write(tmp_path / "a.csv", text=TEXTS, label=LABELS, site=SITES, part=PARTS)
    return tmp_path


def numbers(text):
    """Return the token numbers of a text without special tokens."""
    return [WORDS.index(word) if word in WORDS else UNK for word in text.split()]


def with_special(text, length):
    """Return the tokens of a text as BERT's tokenizer gives them, and their mask."""
    ids = [CLS, *numbers(text)[: length - 2], SEP]
    return ids + [PAD] * (length - len(ids)), [1] * len(ids) + [0] * (length - len(ids))


def read(root, tokenizer, **options):
    return tokenized_text(root, **{"path": "a.csv", "tokenizer": tokenizer, "split_column": "part", **options})


def test_texts_with_labels(root, tokenizer):
    data = read(root, tokenizer, label_column="label", site_column="site")
    expected = [with_special(text, 9) for text in TEXTS]  # the longest text: 7 words and 2 special tokens
    train = [k for k, part in enumerate(PARTS) if part != "test"]
    for which, name in enumerate(("input_ids", "attention_mask")):
        assert data.train_x[name].tolist() == [expected[k][which] for k in train]
        assert data.test_x[name].tolist() == [expected[5][which]]
    assert data.train_y.tolist() == [["no", "yes"].index(LABELS[k]) for k in train]
    assert (data.classes, data.input_and_class_names, data.site_names) == (2, ("no", "yes"), ("north", "south"))
    assert data.site.tolist() == [0, 0, 1, 1, 1]
    assert data.train_x.dtype == {"input_ids": torch.int64, "attention_mask": torch.int64}


def test_long_texts_are_truncated_with_a_warning(root, tokenizer):
    with pytest.warns(UserWarning, match="max_length: 1 of 6 texts are truncated to 5 tokens"):
        data = read(root, tokenizer, label_column="label", max_length=5)
    assert data.train_x["input_ids"][4].tolist() == with_special(TEXTS[4], 5)[0]
    assert data.train_x["input_ids"][1].tolist() == with_special(TEXTS[1], 5)[0]  # exactly 5 tokens


def test_a_text_without_tokens_is_padding(root, tmp_path):
    plain = save_tokenizer(tmp_path / "plain", special=False)
    with pytest.warns(UserWarning, match=r"1 text of .*a\.csv without tokens, the first one in line 5"):
        data = read(root, plain, label_column="label")
    assert data.train_x["input_ids"][3].tolist() == [PAD] * 7
    assert not data.train_x["attention_mask"][3].any()


def test_the_eos_token_pads_if_there_is_no_pad_token(root, tmp_path):
    folder = save_tokenizer(tmp_path / "t", pad_token=None)
    data = read(root, folder, label_column="label")
    ids, mask = data.train_x["input_ids"], data.train_x["attention_mask"]
    assert set(ids[mask == 0].tolist()) == {EOS}


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_side_of_the_tokenizer(root, tmp_path, side):
    folder = save_tokenizer(tmp_path / "t", padding_side=side)
    data = read(root, folder, label_column="label")
    ids, _ = with_special(TEXTS[0], 4)
    pad = [PAD] * 5
    assert data.train_x["input_ids"][0].tolist() == ([*pad, *ids] if side == "left" else [*ids, *pad])
    assert data.train_x["attention_mask"].sum() == sum(len(numbers(text)) + 2 for text in TEXTS[:5])


def test_pairs_of_texts(root, tmp_path):
    names = ["input_ids", "token_type_ids", "attention_mask"]
    folder = save_tokenizer(tmp_path / "pairs", model_input_names=names)
    write(root / "a.csv", first=TEXTS, second=TEXTS[::-1], label=LABELS, part=PARTS)
    data = read(root, folder, text_column=["first", "second"], label_column="label")
    first, second = numbers(TEXTS[1]), numbers(TEXTS[4])
    ids, kinds = [CLS, *first, SEP, *second, SEP], [0] * (len(first) + 2) + [1] * (len(second) + 1)
    width = data.train_x["input_ids"].shape[1]
    assert data.train_x["input_ids"][1].tolist() == ids + [PAD] * (width - len(ids))
    assert data.train_x["token_type_ids"][1].tolist()[: len(ids)] == kinds
    assert "token_type_ids" not in list(read(root, folder, text_column="first", label_column="label").train_x)


# ---- language models ----
def naive_blocks(texts, length):
    """Return inputs, masks and targets of the texts of one site, token by token."""
    stream = [token for text in texts for token in [CLS, *numbers(text), SEP, EOS]]
    rows = []
    for start in range(0, len(stream) - 1, length):
        ids, mask, y = [], [], []
        for place in range(start, start + length):
            known = place + 1 < len(stream)
            ids.append(stream[place] if known else PAD)
            y.append(stream[place + 1] if known else -100)
            mask.append(int(known))
        rows.append((ids, mask, y))
    return rows


@pytest.mark.parametrize("length", [3, 4, 50])
def test_packed_texts_of_each_site(root, tokenizer, length):
    data = read(root, tokenizer, site_column="site", max_length=length)
    for site, name in enumerate(("north", "south")):
        for prefix, is_test in (("train", False), ("test", True)):
            texts = [t for t, s, p in zip(TEXTS, SITES, PARTS, strict=True) if s == name and (p == "test") == is_test]
            rows = (data.test_site if is_test else data.site) == site
            expected = naive_blocks(texts, length) if texts else []
            x, y = getattr(data, f"{prefix}_x")[rows], getattr(data, f"{prefix}_y")[rows]
            width = y.shape[1]  # samples are cut to the longest one
            assert x["input_ids"].tolist() == [ids[:width] for ids, _, _ in expected]
            assert x["attention_mask"].tolist() == [mask[:width] for _, mask, _ in expected]
            assert y.tolist() == [targets[:width] for _, _, targets in expected]
    assert data.classes == len(WORDS)
    assert data.input_and_class_names == ()


def test_one_text_per_sample(root, tokenizer):
    with pytest.warns(UserWarning, match="1 of 6 texts are truncated to 7 tokens"):
        data = read(root, tokenizer, pack=False, max_length=6)
    for row, text in enumerate(TEXTS[:5]):
        tokens = [CLS, *numbers(text), SEP, EOS][:7]
        pad = 6 - len(tokens) + 1
        assert data.train_x["input_ids"][row].tolist() == tokens[:-1] + [PAD] * pad
        assert data.train_y[row].tolist() == tokens[1:] + [-100] * pad


def test_groups_stay_together(root, tokenizer):
    write(root / "a.csv", text=TEXTS * 5, who=[f"p{k // 3}" for k in range(30)])
    options = {"group_column": "who", "split_column": None, "pack": False}
    data = read(root, tokenizer, **options)
    assert len(data.test_y) % 3 == 0
    assert len(data.test_y) > 0
    assert np.unique(data.group.numpy(), return_counts=True)[1].tolist() == [3] * (len(data.train_y) // 3)


# ---- files ----
def save(folder, columns, names=None):
    """Write one split as `save_to_disk` of Hugging Face's datasets does."""
    arrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True, exist_ok=True)
    table = arrow.table(columns)
    with arrow.ipc.new_stream(str(folder / "data.arrow"), table.schema) as file:
        file.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    label = {"_type": "ClassLabel", "names": names} if names else {"_type": "Value", "dtype": "string"}
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"label": label}}))


@pytest.mark.parametrize("class_label", [True, False])
@pytest.mark.parametrize("language_model", [True, False])
def test_a_saved_data_set_gives_the_same_samples_as_a_table(root, tokenizer, class_label, language_model):
    by_part = {"train": [], "validation": [], "test": []}
    for text, label, site, part in zip(TEXTS, LABELS, SITES, PARTS, strict=True):
        number = ["yes", "no"].index(label) if class_label else label
        by_part["validation" if part == "val" else part].append((text or None, number, site))
    for part, rows in by_part.items():
        columns = dict(zip(("text", "label", "site"), zip(*rows, strict=True), strict=True))
        save(root / "d" / part, {k: list(v) for k, v in columns.items()}, ["yes", "no"] if class_label else None)
    (root / "d" / "dataset_dict.json").write_text(json.dumps({"splits": list(by_part)}))
    order = [0, 1, 2, 4, 3, 5]  # the split validation comes after the split train
    values = {"text": TEXTS, "label": LABELS, "site": SITES, "part": PARTS}
    write(root / "a.csv", **{name: [column[k] for k in order] for name, column in values.items()})
    options = {"site_column": "site"}
    if not language_model:
        options |= {"label_column": "label"} | ({} if class_label else {"class_names": ["yes", "no"]})
    saved = read(root, tokenizer, path="d", split_column=None, **options)
    table = read(root, tokenizer, **options | ({} if language_model else {"class_names": ["yes", "no"]}))
    for part in ("train", "test"):
        for name in ("input_ids", "attention_mask"):
            assert torch.equal(getattr(saved, f"{part}_x")[name], getattr(table, f"{part}_x")[name])
        assert torch.equal(getattr(saved, f"{part}_y"), getattr(table, f"{part}_y"))
    assert torch.equal(saved.site, table.site)
    with pytest.raises(UserError, match=r"data\.test_fraction: 0\.5 has no effect, because the split test of"):
        read(root, tokenizer, path="d", split_column=None, test_fraction=0.5)


def test_silos_have_the_same_length_and_tokenizer(root, tokenizer, tmp_path):
    for site in ("north", "south"):
        rows = [row for row in zip(TEXTS, LABELS, SITES, PARTS, strict=True) if row[2] == site]
        write(tmp_path / f"{site}.csv", text=column(rows, 0), label=column(rows, 1), part=column(rows, 3))
    names, options = ["north", "south"], {"label_column": "label", "split_column": "part", "path": "{site}.csv"}
    opened = open_silos(tokenized_text, root, names, [0, 1], tokenizer=tokenizer, max_length=12, **options)
    assert all(data.train_x["input_ids"].shape[1] == 12 for data in opened.values())
    whole = read(root, tokenizer, label_column="label", site_column="site")
    for k, data in opened.items():
        assert torch.equal(data.train_x["input_ids"][:, :9], whole.train_x[whole.site == k]["input_ids"])
    table = describe_silos(opened)
    federated = build_silo_federation(opened, table, count_local_labels(opened, table, names), names)
    assert federated.files_digest == whole.preparation.tokenizer_digest
    other = save_tokenizer(tmp_path / "other", words=[*WORDS[:5], *WORDS[:4:-1]])
    opened[1] = tokenized_text(root, site="south", tokenizer=other, max_length=12, **options)
    with pytest.raises(UserError, match=r"tokenizer \(data\.tokenizer\) differ between north and south; copy the same"):
        count_local_labels(opened, describe_silos(opened), names)


def column(rows, k):
    return [row[k] for row in rows]


BAD = {
    "no folder": ({"tokenizer": "nowhere"}, r"data\.tokenizer: nowhere does not exist \(relative to .*save_pretrained"),
    "a file": ({"tokenizer": __file__}, r"data\.tokenizer: .*\.py is not a folder"),
    "no tokenizer": ({"tokenizer": "/"}, r"data\.tokenizer: / cannot be read as a tokenizer: .*save_pretrained"),
    "no text": ({"text_column": "review"}, r"a\.csv has no column 'review' \(data\.text_column\)"),
    "no label": ({"label_column": "stars"}, r"a\.csv has no column 'stars' \(data\.label_column\)"),
    "no site": ({"site_column": "city"}, r"a\.csv has no column 'city' \(data\.site_column\)"),
    "labels": ({"class_names": ["a", "b"]}, r"class_names needs labels, but data\.label_column is not set"),
    "kind": ({"target": "number"}, r"data\.target: number needs labels"),
    "two": ({"text_column": ["text", "label"]}, r"text_column with two columns needs labels"),
    "groups": ({"group_column": "site"}, r"group_column \(site\) cannot be combined with data\.pack: true"),
    "pack": ({"label_column": "label", "pack": True}, r"data\.pack is for language models .*; remove data\.pack"),
    "silo": (
        {"site": "north", "path": "{site}.csv", "site_column": "site"},
        r"data\.site_column \(site\) needs the ro",
    ),
    "short": ({"max_length": 2, "label_column": "label"}, r"max_length: 2 leaves no room .*adds 2 .*at least 3"),
    "no file": ({"path": "b.csv"}, r"tokenized_text: file .*b\.csv not found"),
    "fraction": ({"test_fraction": 0.1}, r"data\.test_fraction: 0\.1 has no effect, because data\.split_column"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(root, tokenizer, case):
    options, message = BAD[case]
    options = options | ({"tokenizer": Path(options["tokenizer"])} if "tokenizer" in options else {})
    with pytest.raises(UserError, match=message):
        read(root, **{"tokenizer": tokenizer, **options})


def test_limits_of_the_tokenizer(root, tmp_path):
    with pytest.raises(UserError, match=r"max_length: 9 is larger than the 8 tokens that .* allows; lower it, or"):
        read(root, save_tokenizer(tmp_path / "short", model_max_length=8), max_length=9)
    no_end = save_tokenizer(tmp_path / "no_end", eos_token=None)
    with pytest.raises(UserError, match=r"pack: true joins texts with the eos token, but .* has none; set eos_token"):
        read(root, no_end)
    assert (read(root, no_end, pack=False).train_y != EOS).all()
    neither = save_tokenizer(tmp_path / "neither", eos_token=None, pad_token=None)
    with pytest.raises(UserError, match="has neither a pad token nor an eos token"):
        read(root, neither, label_column="label")


def test_missing_cells(root, tokenizer):
    for name in ("label", "site"):
        columns = {"text": TEXTS, "label": LABELS, "site": SITES, "part": PARTS}
        write(root / "a.csv", **columns | {name: ["x", "", "x", "y", "y", "x"]})
        with pytest.raises(
            UserError, match=rf"a\.csv, line 3: the cell in column '{name}' is empty; fill it in, or drop the row"
        ):
            read(root, tokenizer, label_column="label", site_column="site")


def test_a_column_of_numbers_is_no_text(root, tokenizer):
    pytest.importorskip("pyarrow")
    save(root / "d", {"text": [1.0, 2.0], "label": ["a", "b"]})
    with pytest.raises(UserError, match=r"column 'text' \(data\.text_column\) contains numbers, not texts"):
        read(root, tokenizer, path="d", split_column=None)


# ---- runs ----
MODELS = """\
import torch
from torch import nn

class Reader(nn.Module):
    def __init__(self, words, outputs, per_token, zero):
        super().__init__()
        self.embedding = nn.Embedding(words, 8)
        self.head = nn.Linear(8, outputs)
        self.per_token = per_token
        if zero:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, input_ids, attention_mask):
        z = self.embedding(input_ids)
        if not self.per_token:
            z = (z * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True).clamp(min=1)
        return self.head(z)

def classifier(input_shape, classes):
    return Reader(11, classes, False, False)

def writer(input_shape, classes, zero: bool = False):
    return Reader(classes, classes, True, zero)
"""


def train(place, tokenizer, data, **more):
    (place / "models.py").write_text(MODELS)
    data = {"source": "tokenized_text", "root": str(place), "path": "a.csv", "tokenizer": str(tokenizer), **data}
    tree = {
        "name": "run",
        "rounds": 3,
        "output": str(place / "runs"),
        "data": data,
        "method": {"name": "fedavg"},
        "train": {"batch_size": 4, "lr": 1.0},
        "report": False,
        **more,
    }
    (place / "c.yaml").write_text(yaml.safe_dump(tree))
    execute_run(config.load(place / "c.yaml"))
    rows = (place / "runs" / tree["name"] / "metrics.jsonl").read_text().splitlines()
    return place / "runs" / tree["name"], [json.loads(row) for row in rows]


def reviews(place, n=60):
    """Write texts whose label depends on a word."""
    rng = np.random.default_rng(0)
    words = [[WORDS[k] for k in rng.integers(5, 11, rng.integers(2, 9))] for _ in range(n)]
    label = ["yes" if "good" in each else "no" for each in words]
    part = ["test" if k % 4 == 0 else "train" for k in range(n)]
    text = [" ".join(each) for each in words]
    write(place / "a.csv", text=text, label=label, part=part, site=["a", "b"] * (n // 2))
    rows = [k for k in range(n) if part[k] == "test"]
    write(place / "new.csv", label=[label[k] for k in rows], text=[text[k] for k in rows])


def test_predictions_for_new_texts(tmp_path, tokenizer, monkeypatch):
    reviews(tmp_path)
    moved = shutil.copytree(tokenizer, tmp_path / "moved")
    run, rows = train(
        tmp_path,
        moved,
        {"label_column": "label", "split_column": "part", "partition": {"scheme": "iid", "clients": 2}},
        model={"name": f"{tmp_path}/models.py:classifier"},
    )
    results = package.load(run, trust=True).predict(tmp_path / "new.csv")
    assert results.metrics["accuracy"] == rows[-1]["accuracy"]
    texts = {"text": ["good", "bad film", ""]}
    model = package.load(run, trust=True)
    assert model.predict(texts)["prediction"] == model.predict(texts["text"])["prediction"]
    with pytest.warns(UserWarning, match="length of the training samples: 1 of 1 texts are truncated to 10 tokens"):
        cut = model.predict(["bad " * 20])
    assert cut["probability_yes"] == model.predict(["bad " * 8])["probability_yes"]
    with pytest.raises(UserError, match="rows: all columns must have the same number of rows, and at least one"):
        model.predict([])
    assert "(tokenizer)" in json.loads((run / "identity.json").read_text())
    monkeypatch.chdir(tmp_path)
    moved.rename(tmp_path / "again")
    with pytest.raises(UserError, match=r"data\.tokenizer: .*moved does not exist"):
        package.load(run, trust=True).predict(texts)
    there = package.load(run, trust=True, overrides=["data.tokenizer=again"]).predict(tmp_path / "new.csv")
    assert there.metrics == results.metrics
    save_tokenizer(tmp_path / "again", words=[*WORDS[:5], *WORDS[:4:-1]])
    with pytest.raises(UserError, match=r"the files in again differ from those of the training"):
        package.load(run, trust=True, overrides=["data.tokenizer=again"]).predict(texts)
    write(tmp_path / "new.csv", review=["good"])
    with pytest.raises(UserError, match=r"new\.csv has no column 'text'"):
        package.load(run, trust=True, overrides=["data.tokenizer=" + str(tokenizer)]).predict(tmp_path / "new.csv")


@pytest.mark.parametrize("pack", [True, False])
def test_a_language_model_reports_the_perplexity_of_tokens(tmp_path, tokenizer, pack):
    """With constant logits the perplexity is the number of tokens; training lowers it."""
    reviews(tmp_path)
    run, rows = train(
        tmp_path,
        tokenizer,
        {"split_column": "part", "site_column": "site", "max_length": 8, "pack": pack, "partition": {"scheme": "site"}},
        model={"name": f"{tmp_path}/models.py:writer", "zero": True},
        task={"name": "language_model"},
        train={"batch_size": 4, "lr": 1e-30},
    )
    assert rows[-1]["perplexity"] == pytest.approx(len(WORDS), rel=1e-6)
    assert rows[-1]["loss"] == pytest.approx(math.log(len(WORDS)), rel=1e-6)
    assert json.loads((run / "partition.json").read_text())["label_counts"] is None  # tokens are not classes of samples
    _, rows = train(
        tmp_path,
        tokenizer,
        {"split_column": "part", "site_column": "site", "max_length": 8, "pack": pack, "partition": {"scheme": "site"}},
        model={"name": f"{tmp_path}/models.py:writer"},
        task={"name": "language_model"},
        name="trained",
    )
    assert rows[-1]["perplexity"] < 9  # three tokens are rare or can be known from the one before
    with pytest.raises(UserError, match="this run is a language model over tokens, for which there is no table"):
        package.load(run, trust=True).predict({"text": ["good"]})


@pytest.mark.parametrize("model", ["classifier", "writer"])
def test_a_forgotten_label_column_is_named(tmp_path, tokenizer, model):
    reviews(tmp_path)
    data = {"partition": {"scheme": "iid", "clients": 2}}
    with pytest.raises(UserError, match=r"language_model.*to predict classes of texts, set data\.label_column"):
        train(tmp_path, tokenizer, data, model={"name": f"{tmp_path}/models.py:{model}"})
