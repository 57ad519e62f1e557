"""Site names that the locale cannot encode are printed as escapes by every command."""

import re

import pytest
from helpers import clean_env, fedmpi
from real_job import succeed

LOCALE = clean_env(PYTHONIOENCODING="iso-8859-1")  # the encoding of the streams that an 8-bit locale gives
ATHENS, ESCAPED = "Αθήνα", r"\u0391\u03b8\u03ae\u03bd\u03b1"


@pytest.fixture
def folder(tmp_path):
    rows = [f"{ATHENS if k % 2 else 'north'},{k * 7 % 11},{k % 3 == 0:d}\n" for k in range(40)]
    (tmp_path / "a.csv").write_text("who,a,label\n" + "".join(rows), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        f"name: r\noutput: {tmp_path}/runs\nrounds: 1\n"
        f"data: {{source: table, root: {tmp_path}, path: a.csv, site_column: who, partition: {{scheme: site}}}}\n"
        "model: {name: logistic}\nmethod: {name: fedavg}\ntrain: {lr: 0.1, batch_size: 8}\ncompute: {threads: 1}\n"
    )
    return tmp_path


def test_commands_escape_names_that_the_locale_cannot_encode(folder):
    assert ESCAPED in succeed("partition", folder / "run.yaml", cold=True, env=LOCALE, encoding="iso-8859-1").stdout
    succeed("run", folder / "run.yaml", cold=True, env=LOCALE, encoding="iso-8859-1")


@pytest.mark.parametrize("kind", ["alone", "torchrun"])
def test_errors_escape_names_that_the_locale_cannot_encode(folder, kind):
    words = ["run", folder / "run.yaml", "data.label_column=ετικέτα"]
    size = 1 if kind == "alone" else 2
    done = fedmpi(*words, kind=kind, size=size, cold=True, env=LOCALE, encoding="iso-8859-1")
    assert done.returncode != 0
    assert len(re.findall(r"error: .*no column '\\u03b5", done.stderr)) == 1, done.stderr
