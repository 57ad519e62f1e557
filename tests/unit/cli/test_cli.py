"""The command line: exit codes, who reports what, and how soon."""

import gc
import os
import signal
import sys
import types
from functools import partial

import pytest

from fedmpi import cli, runtime
from fedmpi.cli import arguments
from fedmpi.comm import Timeouts
from fedmpi.common.errors import UserError
from fedmpi.common.signals import SIGNALS
from fedmpi.runtime import execute as run_module
from fedmpi.runtime import introspection
from fedmpi.runtime.introspection import describe_component

GOOD = """\
data: {source: digits, partition: {scheme: iid, clients: 4}}
model: {name: mlp}
method: {name: fedavg}
compute: {threads: 1}
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(GOOD)
    return file


@pytest.fixture
def engine(monkeypatch):
    """Stands for fedmpi.runtime.execute and fedmpi.runtime.validate; remembers the settings that it was given."""
    fake = types.SimpleNamespace(seen=[], outcome=0)

    def execute_run(settings, command, after):
        fake.seen.append((settings, os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]))
        fake.garbage = gc.isenabled(), gc.get_freeze_count()
        if isinstance(fake.outcome, BaseException):
            raise fake.outcome
        return {}, fake.outcome

    fake.execute_run, fake.validate_settings = (
        execute_run,
        lambda settings: [("clients", "4"), ("model", settings.model.name)],
    )
    monkeypatch.setitem(sys.modules, "fedmpi.runtime.execute", fake)
    monkeypatch.setitem(sys.modules, "fedmpi.runtime.validate", fake)
    monkeypatch.setattr(runtime, "execute", fake)
    return fake


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher, and an environment and a search path that the test may change."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "MPI_LOCAL")):
            monkeypatch.delenv(name)
    for name in arguments.THREAD_VARIABLES:
        monkeypatch.setenv(name, "7")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(run_module, "Timeouts", partial(Timeouts, reply=0.1))
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    gc.enable()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def rank(monkeypatch, number, size=2):
    for name, value in {"RANK": number, "SIZE": size, "LOCAL_RANK": number, "LOCAL_SIZE": size}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))

    def leave(code):  # os._exit would end the tests too
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)


def main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fedmpi", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


@pytest.mark.parametrize("code", [0, 75])
def test_run_passes_settings_on_and_returns_the_exit_code(monkeypatch, path, engine, code):
    engine.outcome = code
    assert main(monkeypatch, "run", path, "seed=5", "train.lr=-0") == code
    settings, *threads = engine.seen[0]
    assert (settings.seed, settings.method.name) == (5, "fedavg")
    assert threads == ["1", "1"]  # the config's, not the shell's


def test_garbage_collection_is_disabled_only_during_imports(monkeypatch, path, engine):
    assert main(monkeypatch, "run", path) == 0
    assert engine.garbage[0]
    assert engine.garbage[1] > 0
    gc.unfreeze()


def test_validate_shows_a_table(monkeypatch, path, engine, capsys):
    assert main(monkeypatch, "validate", path, "model.name=cnn") == 0
    assert capsys.readouterr().out == "clients  4\nmodel    cnn\n"
    assert engine.seen == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "{path}", "seed=x"], "command line: seed: 'x' is not allowed; must be a whole number"),
        (["run", "{path}.none"], "{path}.none: there is no such config file"),
        (["validate", "{path}", "sede=1"], "command line: sede: unknown key; did you mean 'seed'? allowed: "),
        (["run"], "Missing argument 'CONFIG'"),
        (["rnu"], "No such command 'rnu'"),
        (["list", "fedprx"], "list: unknown kind or name 'fedprx'; did you mean 'fedprox'"),
        (["show", "train.shedule"], "show: unknown key 'train.shedule'; did you mean 'train.schedule'? "),
        (["show", "method.nu"], "show: unknown key 'method.nu'; "),
    ],
)
def test_a_user_error_is_one_message_with_exit_code_2(monkeypatch, path, engine, capsys, arguments, text):
    assert main(monkeypatch, *[argument.format(path=path) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"fedmpi: error: {text.format(path=path)}")
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    ("outcome", "slurm_tasks", "code", "text"),
    [
        (UserError("data/x.npz: damaged"), "", 2, "error: data/x.npz: damaged"),
        (
            UserError("5 tasks, but only one process was started"),
            "5",
            2,
            "error: 5 tasks, but only one process was started",
        ),
        (KeyboardInterrupt(), "", 130, "interrupted"),
    ],
)
def test_an_error_of_the_engine_is_one_line(monkeypatch, path, engine, capsys, outcome, slurm_tasks, code, text):
    """Also where the launcher is used wrongly, so that this process does not know its rank."""
    if slurm_tasks:
        monkeypatch.setenv("SLURM_JOB_ID", "12")
        monkeypatch.setenv("SLURM_NTASKS", slurm_tasks)
    engine.outcome = outcome
    assert main(monkeypatch, "run", path) == code
    assert capsys.readouterr().err.strip() == f"fedmpi: {text}"


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_message_names_its_rank(monkeypatch, path, engine, capsys, number):
    rank(monkeypatch, number)
    who = f"fedmpi [rank {number} on {os.uname().nodename}]" if number else "fedmpi"
    assert main(monkeypatch, "run", path, "seed=x") == 2
    assert capsys.readouterr().err.startswith(f"{who}: error: command line")
    engine.outcome = ZeroDivisionError("division by zero")
    assert main(monkeypatch, "run", path) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"{who}: ")
    assert "Traceback" in err
    assert err.endswith("ZeroDivisionError: division by zero\n")


def test_show_explains_a_key(monkeypatch, capsys):
    assert main(monkeypatch, "show", "train.decay") == 0
    assert capsys.readouterr().out == (
        "train.decay: factor by which lr is multiplied: exponential: after each round (null: 0.99); step: after "
        "1/2 and 3/4 of the rounds (null: 0.1)\n"
        "  type     number > 0 and <= 1, or null\n  default  null\n"
    )
    assert main(monkeypatch, "show", "init") == 0
    assert capsys.readouterr().out == (
        "init: initial weights from a file\n"
        "  init.strict  true or false (default false): require that file and model have the same tensors\n"
        "  init.from    path or null (default null): a run directory, or a safetensors file with state_dict names; "
        "null: random initial weights\n"
    )
    assert main(monkeypatch, "show", "model") == 0
    assert "required: see `fedmpi list models`" in (out := capsys.readouterr().out)
    assert out.endswith("for the options of the component in model, use `fedmpi list` and `fedmpi list NAME`\n")


def test_list_describes_the_options_of_a_component(monkeypatch, capsys):
    assert main(monkeypatch, "list", "random_crop") == 0
    assert capsys.readouterr().out == (
        "augmentations: random_crop\n\n"
        "Crop a random window of the image after adding a border, like RandomCrop(size, padding) of torchvision."
        "\n\n"
        "options:\n"
        "  padding       whole number from 0 to 4,096 (default 4): width of the border in pixels\n"
        "  padding_mode  constant or reflect (default constant): black border, or mirrored image\n"
        "  size          whole number from 1 to 4,096, or null (default null): height and width of the window; null: "
        "those of the image\n"
    )
    assert main(monkeypatch, "list", "fedavg") == 0
    assert capsys.readouterr().out.endswith("\n\nno options\n")


@pytest.mark.parametrize("kind", introspection.KIND_MODULES)
def test_every_component_and_option_has_a_description(kind):
    assert all(introspection.list_summaries(kind).values())
    options = [
        (name, each) for name in introspection.read_registry(kind) for each in describe_component(kind, name).options
    ]
    assert [(name, each.name) for name, each in options if not (each.meaning and each.type and each.default)] == []


def test_help_and_version(monkeypatch, capsys):
    for given in ([], ["--help"]):
        assert main(monkeypatch, *given) == 0
        out = capsys.readouterr().out
        assert [word for word in ("run", "validate", "list", "--version") if word not in out] == []
    assert main(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("fedmpi ")
