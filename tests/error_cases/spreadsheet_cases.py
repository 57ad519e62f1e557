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
    "sheet: a feature twice": (
        *sheet(", features: [city, age, city]"),
        r"table: column 'city': data\.features lists it twice, or it is also in data\.drop",
    ),
    "sheet: a fraction beside parts": (
        *sheet(
            ", split_column: part, test_fraction: 0.2",
            head="site,age,city,sick,part\n",
            rows=[row.replace("\n", ",train\n") for row in ROWS],
        ),
        r"data\.test_fraction: 0\.2 has no effect, because data\.split_column \('part'\) already defines the test set",
    ),
    "sheet: pooled with sites that nobody trains on": (
        *sheet(", standardise: pooled", sites=", site_column: site, partition: {scheme: site, only: [north]}"),
        r"data\.partition\.only excludes sites .*data\.standardise is pooled, .*; set data\.standardise: site",
    ),
    "sheet: categorical of none": (
        *sheet(columns=", label_column: sick, categorical: [town]"),
        r"data\.categorical: 'town' is not a feature column; features: age, city",
    ),
    "sheet: words": (
        *sheet(columns=", label_column: sick"),
        r"line 2: column 'city' contains 'Ulm', .*data\.categorical",
    ),
    "sheet: a gap": (
        *sheet(old="74", new=""),
        AT + r"the cell in column 'age' is empty; fill it in, or set data\.missing to impute",
    ),
    "sheet: inf": (*sheet(old="74", new="inf"), AT + r"column 'age' contains inf; values must be finite"),
    "sheet: one label": (
        *sheet(rows=[row.replace(",1\n", ",0\n") for row in ROWS]),
        r"a\.csv: column 'sick' contains only one label, '0'; add rows",
    ),
    "sheet: UTF-16": (
        sheet()[0],
        _put("a.csv", (HEAD + "".join(ROWS)).encode("utf-16")),
        r"a\.csv cannot be read as CSV in UTF-8: .*; save it as CSV in UTF-8",
    ),
    "sheet: a value of no category": (
        *sheet(columns=", label_column: sick, categorical: {city: [Ulm]}"),
        r"a\.csv, line 3: column 'city' contains 'Bonn', which is not in data\.categorical\.city \(Ulm\)",
    ),
    "sheet: labels that are amounts": (
        *sheet(", drop: [site]", rows=[f"north,{i},Ulm,{i}\n" for i in range(2000)], sites=""),
        r"column 'sick' contains 2000 distinct values in 2000 rows, .*; set data\.target: number for",
    ),
    "sheet: a cell less": (
        *sheet(old="74,", new=""),
        AT + r"the row 'south,Ulm,1' has 3 cells, but the header has 4; add the missing cells",
    ),
    "sheet: empty": (sheet()[0], _put("a.csv", b""), r"a\.csv is empty; its first line must contain the column names"),
    "sheet: a header alone": (sheet()[0], _put("a.csv", HEAD), r"a\.csv has no rows below its header"),
    "sheet: semicolons": (
        sheet()[0],
        _put("a.csv", (HEAD + "".join(ROWS)).replace(",", ";")),
        r"""separated by ';', not ','; set data\.delimiter: ";\"""",
    ),
    "sheet: a column twice": (*sheet(head="site,age,age,sick\n"), r"column 'age' appears twice in the header"),
    "sheet: no such file": (
        "source: table, path: b.csv, label_column: sick",
        None,
        r"table: file .*b\.csv not found",
    ),
    "sheet: no part": (
        *sheet(
            ", split_column: part",
            head="site,age,city,sick,part\n",
            rows=[row.replace("\n", ",x\n") for row in ROWS],
        ),
        r"a\.csv, line 2: column 'part' contains 'x'; allowed values: train, training, val",
    ),
    "sheet: nothing to learn from": (
        *sheet(", drop: [age, city]", columns=", label_column: sick"),
        r"no feature column remains",
    ),
    "sheet: parquet without pyarrow": (
        "source: table, path: a.parquet, label_column: sick",
        _put("a.parquet", b"PAR1"),
        r"a\.parquet cannot be read(, because pyarrow is not installed; pip install '.*parquet\]'| as Parquet)",
    ),
}
ALONE = r"needs the rows of all sites, but with data\.silos each site reads only its own"
SILOS = ", silos: [a.csv, b.csv], share_ranks: true"
SHEETS |= {
    "silo: sites": (
        *sheet(columns=", label_column: sick, site_column: site", sites=SILOS),
        r"data\.site_column \(site\) " + ALONE,
    ),
}


SHEETS |= {
    "saved: not there": (
        "source: saved_dataset, path: d, input_column: image",
        None,
        r"contains neither dataset_dict\.json nor state\.json; correct data\.root",
    ),
}


def _folder(**texts):
    def write(folder):
        (folder / "plays").mkdir()
        for name, text in texts.items():
            (folder / "plays" / f"{name}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())

    return write


PLAYS = "source: text, path: plays, context: 4, partition: {scheme: site}"
LONG = "to be or not to be "
TEXTS = {
    "text: too short": (
        PLAYS,
        _folder(ann=LONG, bob="hello"),
        r"bob\.txt: author 'bob' has only 4 training characters \(5 in all\), .*data\.context=4 .*min_chars",
    ),
    "text: bytes": (PLAYS, _folder(ann=b"\xff\xfe\xff"), r"ann\.txt cannot be read as text in UTF-8"),
    "text: not in the alphabet": (
        PLAYS + ', alphabet: "tobern "',
        _folder(ann=LONG, bob=LONG + "!"),
        r"bob\.txt: the text of author 'bob' contains '!', which is not in data\.alphabet",
    ),
    "text: silos without an alphabet": (
        "source: text, silos: [a.txt], share_ranks: true",
        _put("a.txt", LONG),
        r"data\.silos requires data\.alphabet",
    ),
    "shakespeare: no role": (
        "source: shakespeare",
        _put("input.txt", "First Citizen:\nSpeak.\n\nspeak\n"),
        r"input\.txt: .* names the speaker, such as 'ROMEO:', but one begins with 'speak'",
    ),
    "brca: no such file": ("source: tcga_brca", None, r"tcga_brca: file .*brca\.csv not found .*owkin/FLamby"),
}
ALL = (SHEETS, TEXTS)
