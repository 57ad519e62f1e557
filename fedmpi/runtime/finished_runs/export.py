"""Export a run's model to a file that can be used without fedmpi, in safetensors or ONNX format (`fedmpi export`).

An ONNX file is loaded and compared with the model on samples of the test set. If outputs differ, no file is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.comm.base import SingleProcess
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Inputs, Samples, call_module, list_named_tensors
from fedmpi.common.target_scale import TargetScale
from fedmpi.config.schema import Settings
from fedmpi.data.batches import batches
from fedmpi.runtime import build_data, code_trust
from fedmpi.runtime.device import configure_numerics
from fedmpi.runtime.finished_runs.models import ClientPredictor, RunModel
from fedmpi.runtime.finished_runs.predict import find_client_site, write_output_file
from fedmpi.runtime.record.run_dir import serialize_model
from fedmpi.runtime.record.saved_model import format_personal_notice

FORMATS = ("safetensors", "onnx")
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # packages needed for ONNX, in addition to torch
LARGE_BATCH, SMALL_BATCH = 64, 3  # numbers of test samples in batches on which outputs are compared, besides 1
TOLERANCE = 1e-4  # allowed difference, relative to the largest output (to 1 if outputs are smaller)


def export_model(
    run_model: RunModel, file_format: str, print_line: Callable[[str], None], out: Path | None = None
) -> Path:
    """Write a model of a run to a file and return the file's path.

    Args:
        run_model: the run, and which of its models to export: the global model or that of a client.
        file_format: safetensors or onnx.
        print_line: prints a line, such as the path and the number of parameters.
        out: the file to write; None: a file in the folder export/ of the run directory.

    Raises:
        UserError: the format is unknown, packages or data are missing, the client of `run_model` does not exist, the
            model cannot be exported, or the outputs of the exported model differ from those of the original.
    """
    run, client = run_model.run_dir, None if run_model.client is None else str(run_model.client)
    of_client = "" if client is None else f"-client-{client}"
    path = out or run / "export" / f"{Path(run_model.file_name).stem}{of_client}.{file_format}"
    if file_format not in FORMATS:
        raise UserError(f"--format: {file_format} is not allowed; must be {' or '.join(FORMATS)}")
    if file_format == "onnx" and (missing := [name for name in ONNX_PACKAGES if find_spec(name) is None]):
        raise UserError(
            f"--format onnx needs {', '.join(missing)}, which are not installed; run pip install 'fedmpi[export]'"
        )
    if path.suffix != f".{file_format}":
        raise UserError(f"--out: {path} is not allowed with --format {file_format}; must end in .{file_format}")
    settings = run_model.load_settings("compute.compile=false", "compute.device=cpu")
    with code_trust.forbid_external_code(run_model.trusted):
        configure_numerics(settings)
        facts = run_model.metadata
        if client is not None:
            facts = {"input": facts["input"], "classes": facts["classes"], "client": client}
        elif facts.get("kept"):
            raise UserError(f"there is no complete global model to export: {format_personal_notice(facts)}")
        module = run_model.load(settings)
        if isinstance(module, ClientPredictor):
            raise UserError(
                f"method {settings.method.name}: the outputs of a client's model depend on its training data, which a "
                f"{file_format} file cannot contain; without --client, the network is exported"
            )
        if file_format == "onnx":
            content = _export_onnx(module, settings, client, print_line)
        else:
            content = serialize_model(module.state_dict(), facts)
    write_output_file(path, content)
    print_line(f"{path}: {sum(p.numel() for p in module.parameters()):,} parameters")
    return path


# ---- ONNX ----
class _ExportWrapper(nn.Module):
    """A wrapper for the ONNX exporter: its arguments are tensors, and its outputs are in the units of the targets."""

    def __init__(self, module: nn.Module, names: Sequence[str], scale: TargetScale | None) -> None:
        super().__init__()
        self.module, self.names, self.scale = module.eval(), tuple(names), scale

    def forward(self, *tensors: Tensor) -> Tensor:
        x = Inputs(dict(zip(self.names, tensors, strict=True))) if any(self.names) else tensors[0]
        out: Tensor = call_module(self.module, x)
        return out if self.scale is None else self.scale.to_original_units(out)


def _export_onnx(module: nn.Module, settings: Settings, client: str | None, print_line: Callable[[str], None]) -> bytes:
    """Return the bytes of an ONNX file, after checking on test samples that its outputs agree with the model's."""
    silos = settings.data.silos
    data = (
        build_data.build_silo_data(settings, SingleProcess(torch.device("cpu")))
        if silos
        else build_data.build_partitioned_data(settings)
    )
    shards = chain([data.global_test], data.test.values())
    shard = next((each for each in shards if each is not None and len(each)), None)
    if shard is None:
        raise UserError("--format onnx: the run has no test samples on which outputs could be compared")
    samples: Samples = next(iter(batches(shard, LARGE_BATCH, None)))[0]
    named = list_named_tensors(samples, "")  # a single tensor has the name ""
    site = "" if client is None or not data.site_names else find_client_site(data.site_names, client)
    scale = data.target_scales.get("", data.target_scales.get(site))
    if data.target_scales and scale is None:
        print_line(
            "the outputs are standardised targets (data.standardise_target); see preprocessing.json of each site"
        )
    exported = _ExportWrapper(module, [name for name, _ in named], scale)
    with TemporaryDirectory(prefix="fedmpi-export-") as place:
        file = Path(place) / "model.onnx"
        names = [name or "x" for name, _ in named]
        difference, largest = _export_and_compare(exported, file, dict(zip(names, (t for _, t in named), strict=True)))
        content = file.read_bytes()
    if not difference <= TOLERANCE * max(1.0, largest):
        raise UserError(
            f"--format onnx: the exported model's outputs differ by {difference:.3g} on test samples (largest output "
            f"{largest:.3g}); the model may use random numbers, or branches that depend on values, which ONNX cannot "
            "represent; no file was written"
        )
    print_line(f"outputs on {len(samples)} test samples, in batches and one by one, differ by at most {difference:.2g}")
    return content


def _export_and_compare(module: nn.Module, file: Path, inputs: dict[str, Tensor]) -> tuple[float, float]:
    """Export a module to an ONNX file, and compare the outputs of the two on batches of several sizes.

    Returns the largest absolute difference between outputs, and the largest absolute output of the module.
    """
    import onnxruntime

    few = tuple(t[:SMALL_BATCH].clone() for t in inputs.values())
    options: dict[str, Any] = {"input_names": list(inputs), "output_names": ["output"], "external_data": False}
    options["dynamic_shapes"] = (tuple({0: torch.export.Dim("batch")} for _ in few),)
    difference = largest = 0.0
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # the exporter's warnings do not concern users
            torch.onnx.export(module, few, str(file), dynamo=True, **options)
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        used = {each.name for each in session.get_inputs()}
        for rows in (slice(None), slice(SMALL_BATCH), slice(1), slice(1, 2)):
            part = {name: t[rows] for name, t in inputs.items()}
            with torch.no_grad():
                expected = module(*part.values())
            outputs = torch.from_numpy(session.run(None, {k: t.numpy() for k, t in part.items() if k in used})[0])
            largest = max(largest, float(expected.abs().max()))
            difference = max(difference, float((outputs - expected).abs().max()))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise UserError(f"--format onnx: this model cannot be exported: {reason}; no file was written") from error
    return difference, largest
