"""`fedmpi export`: a run's model as a file that needs no fedmpi: TorchScript, ONNX, or weights alone (safetensors).

The file takes a batch of any size, of samples as the data source gives them; of several tensors one argument each, in
their order; beside it lies how these samples are made (runtime/record/data_files.py). It is read back and compared
with the model on samples of the test set, one by one and together; where the outputs differ, or it cannot be made,
there is an error and no file.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.comm.base import Solo
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Inputs, Samples, call
from fedmpi.common.target_scale import TargetScale
from fedmpi.config.schema import Settings
from fedmpi.data.batches import batches
from fedmpi.runtime import build, build_data, trust
from fedmpi.runtime.build import Experiment
from fedmpi.runtime.device import set_numerics
from fedmpi.runtime.finished.models import ClientPredictor, client_model, rebuild_model
from fedmpi.runtime.finished.predict import site_of
from fedmpi.runtime.record.data_files import PREPROCESSING, site_file
from fedmpi.runtime.record.durable import read_weights
from fedmpi.runtime.record.run_dir import BEST, MODEL, RunDirectory
from fedmpi.runtime.record.saved_model import facts_of, personal_facts, personal_notice

SUFFIX = {"torchscript": ".pt", "onnx": ".onnx", "safetensors": ".safetensors"}
NEEDS = ("onnx", "onnxscript", "onnxruntime")  # beside torch, for onnx
SAMPLES, FEW = 64, 3  # of the test set, together and as another size of batch
CLOSE = 1e-4  # of the largest output

Run = Callable[[Samples], Tensor]  # the file, read back


def export(
    run: Path,
    to: str,
    say: Callable[[str], None],
    *,
    best: bool = False,
    client: str | None = None,
    out: Path | None = None,
    trusted: bool = False,
    given: Sequence[str] = (),
) -> Path:
    """Write the global model of a run directory, or that of a client, to a file and compare; returns where.

    Raises UserError: an unknown format, packages or data that are missing, a model that is no client's, or that cannot
    be exported, outputs that differ.
    """
    if to not in SUFFIX:
        raise UserError(f"--to: {to}; allowed: {', '.join(SUFFIX)}")
    missing = [name for name in NEEDS if to == "onnx" and find_spec(name) is None]
    if missing:
        raise UserError(f"--to onnx needs {', '.join(missing)}, not installed here: pip install 'fedmpi[export]'")
    if out is not None and (out.suffix != SUFFIX[to] or out.is_dir()):
        raise UserError(f"--out: {out}: a file whose name ends in {SUFFIX[to]} is needed, for --to {to}")
    settings = trust.run_settings(run, trusted, [*given, "compute.compile=false", "compute.device=cpu"])
    name = BEST if best else MODEL
    with trust.guard(trusted):
        set_numerics(settings)
        module, facts = rebuild_model(run, settings, name), facts_of(run / name)
        if client is not None:
            module = client_model(run, client, trusted, best, given)
            facts = {"input": facts["input"], "classes": facts["classes"], "client": client}
        if isinstance(module, ClientPredictor):
            raise UserError(
                f"method {settings.method.name}: what a client uses is more than weights: its outputs look into its "
                f"training data (hook predict), which no file of {to} holds. fedmpi.load({str(run)!r}, "
                f"client={client}) gives it where these data are; without --client the network is exported alone"
            )
        solo = Solo(torch.device("cpu"))
        data = build_data.siloed(settings, solo) if settings.data.silos else build_data.partitioned(settings)
        experiment = build.experiment(settings, data, torch.device("cpu"))
        if client is None:
            _check_personal(experiment, say)
        scale = _scale(experiment, client)
        if to != "safetensors" and scale is not None:
            module = _InTargetUnit(module, scale)
        elif experiment.data.target_scales:
            say("the outputs are standardised targets (data.standardise_target); the preprocessing beside it says how")
        x = _samples(experiment)
        stem = Path(name).stem if client is None else f"{Path(name).stem}-client-{client}"
        path = out or run / "export" / f"{stem}{SUFFIX[to]}"
        with _written(path) as temporary, torch.inference_mode():
            run_file = WRITERS[to](module, x, temporary, lambda: rebuild_model(run, settings, name), facts)
            difference, largest = _compare(module, run_file, x, to)
    prepared, beside = _preprocessing(run, settings, client), path.with_suffix(".preprocessing.json")
    if prepared is not None:
        with _written(beside) as temporary:
            temporary.write_bytes(prepared.read_bytes())
    size = sum(p.numel() for p in module.parameters())
    say(f"{path}: {size:,} parameters; takes {_look(x)}")
    if prepared is not None:
        say(f"{beside}: how rows are prepared for it")
    compared = f"{len(x)} test samples, together and one by one: outputs up to {largest:.4g}"
    say(f"{compared}, largest difference {difference:.2g}")
    return path


def _preprocessing(run: Path, settings: Settings, client: str | None) -> Path | None:
    """Return the preprocessing.json of the model; None where there is none.

    That of a site goes only with the site's own model, or where all sites prepare their rows alike.
    """
    silos = settings.data.silos
    files = [run / PREPROCESSING] if silos is None else [site_file(run, name) for name in silos]
    if silos is not None and client is not None:
        files = [site_file(run, site_of(silos, client))]
    alike = all(file.is_file() for file in files) and len({file.read_bytes() for file in files}) == 1
    return files[0] if alike else None


def _check_personal(experiment: Experiment, say: Callable[[str], None]) -> None:
    """Refuse a global model of which parts stay with the clients; say where clients have models beside it."""
    facts = personal_facts(experiment.settings.method.name, experiment.messages)
    if not facts:
        return
    if facts["kept"]:
        raise UserError(f"there is no whole global model to export: {personal_notice(facts)}")
    say(personal_notice(facts))


def _scale(experiment: Experiment, client: str | None) -> TargetScale | None:
    """Return mean and deviation of the targets of a model; None where there are none, or sites differ."""
    scales, sites = experiment.data.target_scales, experiment.data.site_names
    if client is None or "" in scales or not sites:
        return scales.get("")
    return scales.get(site_of(sites, client))


class _InTargetUnit(nn.Module):
    """A model whose outputs are in the unit of the targets, around one whose outputs are standardised."""

    def __init__(self, module: nn.Module, scale: TargetScale) -> None:
        super().__init__()
        self.module = module.eval()
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.tensor(scale.mean))
        self.register_buffer("deviation", torch.tensor(scale.deviation))

    def forward(self, *x: Tensor, **named: Tensor) -> Tensor:
        out: Tensor = self.module(*x, **named)
        return (out.flatten(1) * self.deviation + self.mean).view_as(out)


def _samples(experiment: Experiment) -> Samples:
    """Return some test samples as the model gets them."""
    shards = chain([experiment.data.global_test], experiment.data.test.values())
    shard = next((each for each in shards if each is not None and len(each)), None)
    if shard is None:
        raise UserError("export: the run has no test samples to compare outputs on")
    x: Samples = next(iter(batches(shard, SAMPLES, None)))[0]
    return x


@contextmanager
def _written(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which is renamed to `path` afterwards, or removed after an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()  # what cannot be written is no fault of the model, which exporters would blame
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"--out: cannot write {path}: {error.strerror or error}; choose another file") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _compare(module: nn.Module, file: Run, x: Samples, to: str) -> tuple[float, float]:
    """Compare file and model on the samples together, a few of them, and single ones.

    Returns (largest difference, largest output).
    """
    difference = largest = 0.0
    for rows in (slice(None), slice(FEW), *(slice(i, i + 1) for i in range(min(len(x), FEW)))):
        part: Any = x[rows]
        expected = call(module, part)
        try:
            outputs = file(part)
        except Exception as error:
            raise _refused(to, f"does not run on {len(part)} samples", error) from error
        if outputs.shape != expected.shape:
            sizes = f"{tuple(outputs.shape)} for {len(part)} samples, the model {tuple(expected.shape)}"
            raise UserError(
                f"--to {to}: the file gives {sizes}: its forward depends on values or on the number of samples; "
                "nothing was written"
            )
        largest = max(largest, float(expected.abs().max()))
        difference = max(difference, float((outputs.to(expected.dtype) - expected).abs().max()))
    if not difference <= CLOSE * max(1.0, largest):
        raise UserError(
            f"--to {to}: outputs differ by {difference:.3g} on test samples (outputs up to {largest:.3g}); the model "
            "does something that this format does not hold (chance, or paths that depend on values); nothing was "
            "written"
        )
    return difference, largest


def _refused(to: str, what: str, error: Exception) -> UserError:
    reasons = str(error).strip().splitlines() or [type(error).__name__]
    return UserError(f"--to {to}: this model {what}: {reasons[0][:300]}; nothing was written")


def _look(x: Samples) -> str:
    """Describe the arguments of the exported model: `x (any, 1, 8, 8) float32`."""
    parts = list(x.items()) if isinstance(x, Inputs) else [("x", x)]
    shapes = (
        (name, ", ".join(["any", *map(str, t.shape[1:])]), str(t.dtype).removeprefix("torch.")) for name, t in parts
    )
    return "; ".join(f"{name} ({shape}) {kind}" for name, shape, kind in shapes)


# ---- formats ----
class _Positional(nn.Module):
    """A module that takes several tensors, one argument each."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.names = module, tuple(names)

    def forward(self, *tensors: Tensor) -> Tensor:
        out: Tensor = call(self.module, Inputs(dict(zip(self.names, tensors, strict=True))))
        return out


def _plain(module: nn.Module, x: Samples) -> tuple[nn.Module, tuple[Tensor, ...], list[str]]:
    """Return a module that takes tensors as arguments, the tensors, and their names."""
    if not isinstance(x, Inputs):
        return module, (x,), ["x"]
    names = list(x.keys())
    return _Positional(module, names), tuple(x[name] for name in names), names


def _torchscript(module: nn.Module, x: Samples, path: Path, *_: Any) -> Run:
    plain, inputs = _plain(module, x)[:2]
    with _quiet():
        try:
            traced = torch.jit.trace(plain, tuple(t[:2].clone() for t in inputs), check_trace=False)
        except Exception as error:
            raise _refused("torchscript", "cannot be traced", error) from error
        content = io.BytesIO()
        torch.jit.save(traced, content)
        path.write_bytes(content.getbuffer())  # a full disk is an OSError here
        read: Any = torch.jit.load(str(path))
    return lambda part: read(*_plain(module, part)[1])


def _safetensors(module: nn.Module, x: Samples, path: Path, fresh: Callable[[], nn.Module], facts: Any) -> Run:
    RunDirectory(path.parent).write_model(module.state_dict(), facts, path.name)
    read = fresh()
    for tensor in (*read.parameters(), *read.buffers()):
        tensor.zero_()
    read.load_state_dict(read_weights(path))
    return lambda part: call(read, part)


def _onnx(module: nn.Module, x: Samples, path: Path, *_: Any) -> Run:
    import onnxruntime

    plain, inputs, names = _plain(module, x)
    few = tuple(t[:FEW].clone() for t in inputs)
    batch = {"input_names": names, "output_names": ["output"]}
    shapes = tuple({0: torch.export.Dim("batch")} for _ in names)
    new = {"dynamo": True, "external_data": False, "dynamic_shapes": (shapes,) if len(names) > 1 else shapes}
    old = {"dynamo": False, "dynamic_axes": {name: {0: "batch"} for name in (*names, "output")}}
    first: Exception | None = None
    for way in (new, old):  # what the one cannot, the other often can
        with _quiet(), torch.inference_mode(False), torch.no_grad():
            try:
                torch.onnx.export(plain, few, str(path), verbose=False, **batch, **way)  # type: ignore[arg-type]
                session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
                run = _session(session, module, names)
                run(x[:1]), run(x)  # batches of other sizes
                return run
            except Exception as error:
                first = first or error
    assert first is not None
    raise _refused("onnx", "cannot be exported", first) from first


def _session(session: Any, module: nn.Module, names: Sequence[str]) -> Run:
    def run(part: Samples) -> Tensor:
        inputs = dict(zip(names, _plain(module, part)[1], strict=True))
        used = {each.name for each in session.get_inputs()}  # not those that the model does not use
        return torch.from_numpy(session.run(None, {k: t.numpy() for k, t in inputs.items() if k in used})[0])

    return run


WRITERS: dict[str, Callable[..., Run]] = {"torchscript": _torchscript, "onnx": _onnx, "safetensors": _safetensors}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings and output of exporters, such as that torch.jit is deprecated."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
