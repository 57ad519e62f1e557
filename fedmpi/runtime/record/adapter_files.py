"""Write the adapters of a trained model as files of the library PEFT (model.lora)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fedmpi.models.lora import ADAPTER, AdaptedLayer, LoraConfig, iter_adapted_layers
from fedmpi.runtime.record.atomic_files import write_atomically

PEFT_PREFIX = "base_model.model."  # of parameter names in the files of PEFT
ADAPTER_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"


def write_adapter(
    folder: Path,
    module: nn.Module,
    values: Mapping[str, Tensor],
    config: LoraConfig,
    initial_base: Mapping[str, Tensor] | None,
    base: str,
) -> None:
    """Write the adapters and the head of a model as files that `peft.PeftModel.from_pretrained` reads.

    Args:
        folder: the folder for the files.
        module: the module with adapters.
        values: the tensors of the trained model, by state_dict name.
        initial_base: parameter name -> the base weight before training, if training has changed base weights; None: it
            has not. A change is written as further columns of B and rows of A, so that the files apply to the initial
            base.
        base: where the base model comes from, for the field `base_model_name_or_path`.
    """
    state, ranks, alphas = dict[str, Tensor](), dict[str, int](), dict[str, float]()
    prefix = getattr(module, "peft_prefix", "")  # the library's model may be a submodule of ours
    layers = list(iter_adapted_layers(module))
    for layer in layers:
        a, b, name = values[layer.a].cpu().float(), values[layer.b].cpu().float(), layer.name.removeprefix(prefix)
        if initial_base is not None:
            change = values[layer.base_name].cpu().double() - initial_base[layer.base_name].cpu().double()
            a, b = _append_base_change(layer, a, b, change)
            ranks[name], alphas[name] = a.shape[0], layer.scale * a.shape[0] ** (0.5 if config.rslora else 1)
        for key, tensor in ((layer.a, a), (layer.b, b)):
            state[PEFT_PREFIX + key.removeprefix(prefix).replace(f".{ADAPTER}", "")] = tensor.contiguous()
    adapters = {key for layer in layers for key in (layer.a, layer.b)}
    trained = [n for n, p in module.named_parameters() if p.requires_grad and n not in adapters]
    state |= {PEFT_PREFIX + name.removeprefix(prefix): values[name].cpu().contiguous() for name in trained}
    written: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": config.r,
        "lora_alpha": config.alpha,
        "use_rslora": config.rslora,
        "lora_dropout": config.dropout,
        "target_modules": [layer.name.removeprefix(prefix) for layer in layers],
        "modules_to_save": sorted({name.removeprefix(prefix).rpartition(".")[0] for name in trained}) or None,
        "fan_in_fan_out": False,
        "bias": "none",
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }
    folder.mkdir(exist_ok=True)
    write_atomically(folder / ADAPTER_FILE, safetensors.torch.save(state, {"format": "pt"}))
    write_atomically(folder / CONFIG_FILE, (json.dumps(written, indent=2) + "\n").encode())


def _append_base_change(layer: AdaptedLayer, a: Tensor, b: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors A and B with further rows and columns whose product is a change of the base weight."""
    change = change.flatten(1)
    change = (change.T if layer.transposed else change) / layer.scale
    eigenvalues, vectors = torch.linalg.eigh(change @ change.T)
    basis = vectors[:, eigenvalues > eigenvalues.max().clamp(min=1e-30) * 1e-13]
    rows, columns = (basis.T @ change).float(), basis.float()
    return torch.cat([a, rows.view(-1, *a.shape[1:])]), torch.cat([b, columns.view(len(b), -1, *b.shape[2:])], 1)
