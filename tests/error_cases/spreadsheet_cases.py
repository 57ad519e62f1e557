"""What is wrong with a spreadsheet, or with texts: (`data` in the config, what lies in the folder, what is said)."""

HEAD = "site,age,city,sick\n"
ROWS = [
    f"{site},{age},{city},{sick}\n"
    for site in ("north", "south")
    for age, city, sick in ((30, "Ulm", 0), (41, "Bonn", 1), (52, "Ulm", 0), (63, "Bonn", 1), (74, "Ulm", 1))
]
SITES = ", site_column: site, partition: {scheme: site}"
COLUMNS = ", label_column: sick, categorical: [city]"


def _put(name, content):
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def sheet(more="", old="", new="", columns=COLUMNS, sites=SITES, rows=ROWS, head=HEAD):
    """Two hospitals with five patients each; `old` in the last row becomes `new`."""
    text = head + "".join(rows[:-1]) + rows[-1].replace(old, new)
    return f"source: table, path: a.csv{columns}{more}{sites}", _put("a.csv", text)


AT = r"a\.csv, line 11: "
SHEETS = {
    "sheet: no such column": (
        *sheet(columns=", label_column: sik"),
        r"no column 'sik' \(data\.label_column\); did you mean",
    ),
    "sheet: no column of sites": (
        *sheet(sites=", site_column: hospital, partition: {scheme: site}"),
        r"no column 'hospital' \(data\.site_column\); .*age, city, sick, site",
    ),
    "sheet: no such column to drop": (*sheet(", drop: [ago]"), r"no column 'ago' \(data\.drop\); did you mean 'age'"),
    "sheet: a feature twice": (
        *sheet(", features: [city, age, city]"),
        r"table: 'city' is a column that data\.features names twice, or in data\.drop or",
    ),
    "sheet: a fraction beside parts": (
        *sheet(
            ", split_column: part, test_fraction: 0.2",
            head="site,age,city,sick,part\n",
            rows=[row.replace("\n", ",train\n") for row in ROWS],
        ),
        r"data\.test_fraction: 0\.2 changes nothing, for data\.split_column: part says the test part; leave it out",
    ),
    "sheet: pooled with sites that nobody trains on": (
        *sheet(", standardise: pooled", sites=", site_column: site, partition: {scheme: site, only: [north]}"),
        r"data\.partition\.only leaves sites out .*data\.standardise: pooled .*; say data\.standardise: site",
    ),
    "sheet: categorical of none": (
        *sheet(columns=", label_column: sick, categorical: [town]"),
        r"data\.categorical names 'town', which is none of age, city",
    ),
    "sheet: words": (
        *sheet(columns=", label_column: sick"),
        r"line 2: column 'city' holds 'Ulm', .*data\.categorical",
    ),
    "sheet: a gap": (*sheet(old="74", new=""), AT + r"column 'age' is empty; fill it, or say data\.missing: impute"),
    "sheet: inf": (*sheet(old="74", new="inf"), AT + r"column 'age' holds inf; finite numbers"),
    "sheet: a decimal comma": (
        *sheet(old="74", new='"7,4"'),
        AT + r"column 'age' holds '7,4'.*data\.decimal and data\.thou",
    ),
    "sheet: one label": (
        *sheet(rows=[row.replace(",1\n", ",0\n") for row in ROWS]),
        r"a\.csv: column 'sick' holds one label alone, '0'; two are needed",
    ),
    "sheet: an amount that is none": (
        *sheet(rows=[row.replace(",0\n", ",0.5\n").replace(",1\n", ",1.5\n") for row in ROWS], old="1.5", new="inf"),
        AT + r"column 'sick' holds inf; finite",
    ),
    "sheet: of Excel": (
        "source: table, path: a.xlsx, label_column: sick",
        _put("a.xlsx", b"PK"),
        r"a\.xlsx is a spreadsheet program's own file; save it from there as CSV",
    ),
    "sheet: UTF-16": (
        sheet()[0],
        _put("a.csv", (HEAD + "".join(ROWS)).encode("utf-16")),
        r"a\.csv cannot be read as CSV in UTF-8: .*; save it anew as that",
    ),
    "sheet: no label": (
        *sheet(", missing: impute", old="Ulm,1", new="Ulm,"),
        AT + r"column 'sick' is empty; .*: drop",
    ),
    "sheet: a value of no category": (
        *sheet(columns=", label_column: sick, categorical: {city: [Ulm]}"),
        r"a\.csv, line 3: column 'city' holds 'Bonn', which is none of data\.categorical\.city: Ulm",
    ),
    "sheet: labels that are amounts": (
        *sheet(rows=[f"north,{i},Ulm,{i}\n" for i in range(2000)], sites=""),
        r"column 'sick' holds 2000 labels in 2000 rows; say data\.target: class, or number",
    ),
    "sheet: a cell less": (*sheet(old="74,", new=""), AT + r"3 cells, the header has 4: south,Ulm,1"),
    "sheet: a quote that does not end": (*sheet(old="74", new='"74'), r"a\.csv cannot be read as CSV in UTF-8"),
    "sheet: empty": (sheet()[0], _put("a.csv", b""), r"a\.csv is empty; the names of the columns"),
    "sheet: a header alone": (sheet()[0], _put("a.csv", HEAD), r"a\.csv holds no row below its header"),
    "sheet: semicolons": (
        sheet()[0],
        _put("a.csv", (HEAD + "".join(ROWS)).replace(",", ";")),
        r"""its first line holds ';', not ','.*say data\.delimiter: ";\"""",
    ),
    "sheet: a column twice": (*sheet(head="site,age,age,sick\n"), r"the column 'age' stands twice in its first line"),
    "sheet: no such file": (
        "source: table, path: b.csv, label_column: sick",
        None,
        r"table: there is no file .*b\.csv",
    ),
    "sheet: no path": ("source: table", None, r"table: data\.path is missing"),
    "sheet: a site of one sample": (
        *sheet(rows=[*ROWS, "west,50,Ulm,1\n"]),
        r"a\.csv, line 12: site .west., which begins there, has 1 training row; .*drop, or say data.*: keep",
    ),
    "sheet: a site without training rows": (
        *sheet(
            ", split_column: part, small_sites: keep",
            head="site,age,city,sick,part\n",
            rows=[*(row.replace("\n", ",train\n") for row in ROWS), "west,50,Ulm,1,test\n"],
        ),
        r"line 12: site 'west', which begins there, has 0 training rows; say data\.small_sites: drop",
    ),
    "sheet: no part": (
        *sheet(
            ", split_column: part",
            head="site,age,city,sick,part\n",
            rows=[row.replace("\n", ",x\n") for row in ROWS],
        ),
        r"a\.csv, line 2: column 'part' holds 'x'; allowed: train, training, val",
    ),
    "sheet: nothing to learn from": (
        *sheet(", drop: [age, city]", columns=", label_column: sick"),
        r"no column is left",
    ),
    "sheet: a column without a value": (
        *sheet(
            ", missing: impute, standardise: none",
            rows=[*ROWS[:5], *(f"south,,Ulm,{k % 2}\n" for k in range(5))],
        ),
        r"train_x holds a value that is not finite, first in row 4",
    ),
    "sheet: parquet without pyarrow": (
        "source: table, path: a.parquet, label_column: sick",
        _put("a.parquet", b"PAR1"),
        r"a\.parquet (is read by pyarrow, which is not installed; pip install '.*parquet\]'|cannot be read as Parquet)",
    ),
}
ALONE = r"needs the rows of all sites, and a silo sees its own alone"
SILOS = ", silos: [a.csv, b.csv], share_ranks: true"
SHEETS |= {
    "silo: sites": (
        *sheet(columns=", label_column: sick, site_column: site", sites=SILOS),
        r"data\.site_column: site " + ALONE,
    ),
    "silo: dropped": (*sheet(", small_sites: drop", sites=SILOS), r"data\.small_sites: drop " + ALONE),
}


def _silos(*parts):
    """Two tables; of the second one all patients are ill, and of the parts given."""

    def write(folder):
        for name, sick, column in (("a", "01", ("train",)), ("b", "1", parts or ("train",))):
            rows = (f"{k},{sick[k % len(sick)]},{column[k % len(column)]}\n" for k in range(10))
            (folder / f"{name}.csv").write_text("age,sick,part\n" + "".join(rows))

    return "source: table, label_column: sick, split_column: part, class_names: [0, 1]" + SILOS, write


SHEETS |= {
    "silo: one class": (
        *_silos(),
        r"b\.csv, line 2: .* 10 training rows of one class, '1'; leave it out of data\.silos, .*small_sites: keep",
    ),
    "silo: no training row": (*_silos("test"), r"has 0 training rows; leave it out of data\.silos"),
}
SHEETS |= {
    "saved: not there": (
        "source: saved_dataset, path: d, input_column: image",
        None,
        r"holds neither dataset_dict\.json nor state\.json; save it anew",
    ),
}


def _folder(**texts):
    def write(folder):
        (folder / "plays").mkdir()
        for name, text in texts.items():
            (folder / "plays" / f"{name}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())

    return write


PLAYS = "source: text, path: plays, context: 4, partition: {scheme: site}"
LINES = "source: text, path: a.jsonl, context: 4, partition: {scheme: site}"
LONG = "to be or not to be "
TEXTS = {
    "text: too short": (
        PLAYS,
        _folder(ann=LONG, bob="hello"),
        r"bob\.txt: author 'bob' has 4 characters to train on, of 5; data\.context = 4 needs 5.*min_chars",
    ),
    "text: all too short": (PLAYS + ", min_chars: 99", _folder(ann=LONG), r"min_chars: 99: no author has so many"),
    "text: bytes": (PLAYS, _folder(ann=b"\xff\xfe\xff"), r"ann\.txt cannot be read as text in UTF-8"),
    "text: folders of authors": (
        PLAYS,
        lambda folder: (folder / "plays/ann").mkdir(parents=True),
        r"plays holds no file \*\.txt; all that an author wrote is expected in one",
    ),
    "text: a comma without quotes": (
        "source: text, path: a.csv",
        _put("a.csv", "author,text\nann,to be, or not\n"),
        r"line 2: 3 cells, the header has 2 \(a cell that holds ',' stands in quotes\)",
    ),
    "text: another alphabet": (
        PLAYS + ', alphabet: "tobeornt "',
        _folder(ann=LONG, bob=LONG + "!"),
        r"alphabet holds 'o' twice",
    ),
    "text: not in the alphabet": (
        PLAYS + ', alphabet: "tobern "',
        _folder(ann=LONG, bob=LONG + "!"),
        r"bob\.txt: author 'bob' holds '!', which is not in data\.alphabet",
    ),
    "text: no path": ("source: text", None, r"text: data\.path is missing"),
    "text: no JSON": (LINES, _put("a.jsonl", "hello\n"), r"a\.jsonl, line 1 is no JSON"),
    "text: no author": (
        LINES,
        _put("a.jsonl", '{"autor": "a", "text": "b"}\n'),
        r"a\.jsonl has no column 'author' \(data\.author_column\); did you mean 'autor'",
    ),
    "text: nobody": (
        "source: text, path: a.csv",
        _put("a.csv", "author,text\nann,hello\n,hi\n"),
        r"a\.csv, line 3: column 'author' is empty",
    ),
    "text: silos without an alphabet": (
        "source: text, silos: [a.txt], share_ranks: true",
        _put("a.txt", LONG),
        r"data\.alphabet is missing; silos need it",
    ),
    "shakespeare: no role": (
        "source: shakespeare",
        _put("input.txt", "First Citizen:\nSpeak.\n\nspeak\n"),
        r"input\.txt: a speech begins with 'speak', not with `Role:`",
    ),
    "brca: no such file": ("source: tcga_brca", None, r"tcga_brca: there is no file .*brca\.csv .*owkin/FLamby"),
}
ALL = (SHEETS, TEXTS)
