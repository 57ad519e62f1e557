"""Models of the library `transformers`: `hf:FOLDER`, `hf:TYPE` or `hf:REPOSITORY`.

    hf:models/bert      a local folder with config.json; its weights are loaded, if it has any
    hf:bert             a type of model, with random weights; the options are the keys of its configuration. If a folder
                        of this name has a config.json, it is used instead
    hf:org/name         a repository in the local cache of huggingface_hub

Nothing is downloaded, and no code of a folder is executed. The class of the model depends on task and data:
AutoModelForCausalLM for the tasks next_symbol and language_model, AutoModelForImageClassification for images, and
otherwise AutoModelForSequenceClassification. Weights are converted to float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.models.libraries import (
    LIBRARY_DEFAULT,
    ModelFunction,
    import_library,
    make_function,
    read_parameters,
    unknown_name_error,
)
from fedmpi.models.pretrained import PretrainedWeights, TensorMatch, list_weight_files

CONFIG_FILE = "config.json"
CAUSAL_TASKS = ("next_symbol", "language_model")  # tasks whose targets are the next token at each position
# Keys of a configuration that fedmpi sets itself, or that have no effect on training.
EXCLUDED = (
    *("architectures", "id2label", "label2id", "num_labels", "problem_type", "transformers_version", "auto_map"),
    *("dtype", "torch_dtype", "_name_or_path", "return_dict", "use_cache", "output_hidden_states"),
)


class TransformersModel(nn.Module):
    """A model of the library `transformers` that takes samples of a data set and returns its logits as one tensor.

    Args:
        model: the model, a `PreTrainedModel` with a head.
        classes: the number of outputs; logits of further symbols of a vocabulary are left out.
        input_name: the argument of the model that gets the samples, if these are one tensor.
        has_classifier: whether the last layers are a classifier, not the outputs for a vocabulary.
        pad_token_id: replaces token ids where attention_mask is 0; None: they are not replaced.

    Attributes:
        head_names: names of the parameters of the classifier, as in `named_parameters()`; empty for a language model.
        peft_prefix: prefix of the names of the library's parameters.
        num_embeddings: the number of token ids that the model knows; None if it has no embedding of tokens.
    """

    peft_prefix = "model."

    def __init__(
        self, model: Any, classes: int, input_name: str, has_classifier: bool, pad_token_id: int | None
    ) -> None:
        super().__init__()
        self.model, self.classes, self.input_name, self.pad_token_id = model, classes, input_name, pad_token_id
        self.head_names = _find_classifier(model, self.peft_prefix) if has_classifier else set[str]()
        embeddings = model.get_input_embeddings() if input_name == "input_ids" else None
        self.num_embeddings: int | None = getattr(embeddings, "num_embeddings", None)

    def forward(self, x: Tensor | None = None, **tensors: Tensor) -> Tensor:
        if x is not None:
            tensors[self.input_name] = x
        if self.pad_token_id is not None and "attention_mask" in tensors:
            # Models such as Llama classify the last token that is not the padding token.
            masked = tensors["attention_mask"] == 0
            tensors["input_ids"] = tensors["input_ids"].masked_fill(masked, self.pad_token_id)
        logits: Tensor = self.model(**tensors).logits
        return logits if logits.shape[-1] == self.classes else logits[..., : self.classes]


@dataclass(frozen=True)
class ModelSource:
    """The description of a model by its type and the keys of its configuration.

    Attributes:
        model_type: the type in transformers, such as "bert"; "" if the folder does not exist.
        values: the configuration in the folder; {} for a type.
        folder: the folder; None for a type.
    """

    model_type: str
    values: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None


def hf_model(name: str) -> ModelFunction:
    """A model of the library transformers: hf:FOLDER, or hf:TYPE (hf:bert) with random weights. Needs fedmpi[hf]."""
    import_library("transformers", "hf")
    source = _find_source(name)
    if not source.model_type:  # a finished run, whose settings contain the configuration, does not need the folder
        options = [Parameter("model_type", Parameter.KEYWORD_ONLY, default="", annotation=str)]
        options.append(Parameter("configuration", Parameter.VAR_KEYWORD))
    else:
        options = _list_options(source)

    def build(
        input_shape: Any,
        classes: int,
        task: str | None = None,
        weights: PretrainedWeights | None = None,
        model_type: str = source.model_type,
        **given: Any,
    ) -> nn.Module:
        if not model_type:
            raise _missing_folder_error(name)
        values, from_folder = {**source.values, **given}, name not in _model_types()
        return _make_model(f"hf:{name}", model_type, values, from_folder, input_shape, classes, task, weights)

    return make_function(f"hf:{name}", build, options, ("task", "weights"))


def find_weight_folder(name: str) -> Path | None:
    """Return the folder of a model `hf:FOLDER` or `hf:REPOSITORY` if it contains weights; None for all other models."""
    prefix, _, rest = name.partition(":")
    if prefix != "hf":
        return None
    import_library("transformers", "hf")
    folder = _find_source(rest).folder
    return folder if folder is not None and list_weight_files(folder) else None


def _find_source(name: str) -> ModelSource:
    """Find the folder or the type with this name; a source without a type if it is a path that does not exist."""
    folder, types = Path(name).expanduser(), _model_types()
    if name in types and not (folder / CONFIG_FILE).is_file():
        return ModelSource(name)
    if not folder.is_dir():
        cached = _find_cached_repository(name)
        if cached is None:
            if "/" not in name:
                error = unknown_name_error("transformers", name, types)
                raise UserError(f"there is no folder {folder.absolute()}, and {error}")
            return ModelSource("")
        folder = cached
    path = folder / CONFIG_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        model_type = values["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}: {error}); the folder must contain the configuration of a "
            "model of transformers, as model.save_pretrained(FOLDER) writes it"
        ) from error
    if model_type not in types:
        raise UserError(
            f"{path} has the model type {model_type!r}, which the installed version of transformers does not have "
            "(fedmpi executes no code of a model folder); install a newer version"
        )
    if "quantization_config" in values:
        raise UserError(f"{path} describes quantized weights, which cannot be trained; use a folder without them")
    return ModelSource(model_type, {k: v for k, v in values.items() if k not in (*EXCLUDED, "model_type")}, folder)


@lru_cache(maxsize=1)
def _model_types() -> frozenset[str]:
    """Return the types of models in the library `transformers`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return frozenset(CONFIG_MAPPING.keys())


def _find_cached_repository(name: str) -> Path | None:
    """Return the folder of a repository in the local cache of huggingface_hub; None if it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _missing_folder_error(name: str) -> UserError:
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(name).expanduser().absolute()
    return UserError(
        f"model.name: hf:{name}: there is no folder {folder}, and no repository of this name in the cache "
        f"{HF_HUB_CACHE}; fedmpi downloads no models: copy the folder there, for example with `hf download "
        f"ORGANISATION/NAME --local-dir {folder}` on a machine with network access"
    )


def _list_options(source: ModelSource) -> list[Parameter]:
    """Return the options of a model: the keys of its configuration.

    The values in a folder are their defaults, so that config.yaml of a run directory describes the model without it.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    parameters = read_parameters(CONFIG_MAPPING[source.model_type])
    values = dict(source.values)
    if source.folder is not None:
        values["model_type"] = source.model_type
    names = [*parameters, *(key for key in values if key not in parameters), "attn_implementation"]
    options = []
    for name in dict.fromkeys(names):
        if name in EXCLUDED or not name.isidentifier():
            continue
        hint = parameters[name].annotation if name in parameters else Any
        default = values.get(name, LIBRARY_DEFAULT)
        options.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    return options


def _make_model(
    name: str,
    model_type: str,
    values: Mapping[str, Any],
    from_folder: bool,
    input_shape: Any,
    classes: int,
    task: str | None,
    weights: PretrainedWeights | None,
) -> TransformersModel:
    """Make a model of the library `transformers` from its configuration, and load trained weights, if any are given.

    Args:
        name: the full name of the model, such as hf:bert, for messages.
        values: the configuration.
        from_folder: whether the configuration comes from a folder; otherwise keys that depend on the data are set.
        weights: the trained weights; None: the model keeps its random initial weights.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    is_text = isinstance(input_shape, dict) or len(input_shape) == 1
    is_language_model = task in CAUSAL_TASKS
    auto = (
        transformers.AutoModelForCausalLM
        if is_language_model
        else transformers.AutoModelForSequenceClassification
        if is_text
        else transformers.AutoModelForImageClassification
    )
    kind, values = CONFIG_MAPPING[model_type], dict(values)
    if kind not in auto._model_mapping:
        use = "as a language model" if is_language_model else f"for {'texts' if is_text else 'images'}"
        raise UserError(
            f"model {name}: models of type {model_type} cannot be used {use} ({auto.__name__} does not support "
            "them); choose another model or task"
        )
    known = read_parameters(kind)
    if not from_folder:
        defaults = {"vocab_size": classes} if is_language_model else {} if is_text else _image_values(input_shape)
        values = {key: value for key, value in defaults.items() if key in known} | values
    attention = values.pop("attn_implementation", None)
    config = kind.from_dict({**values, "num_labels": classes, "use_cache": False})
    if is_text:
        _check_text_shape(name, input_shape, config)
    if is_language_model and (getattr(config, "vocab_size", None) or classes) < classes:
        raise UserError(
            f"model {name}: the model has a vocabulary of {config.vocab_size} tokens, but the data have {classes}: "
            "they were made by a tokenizer with another vocabulary; use the tokenizer of the model"
        )
    pad = None
    if is_text and not is_language_model:
        pad = config.pad_token_id = config.pad_token_id if config.pad_token_id is not None else 0
    options = {"dtype": torch.float32, **({"attn_implementation": attention} if attention else {})}
    input_name = "input_ids" if is_text else "pixel_values"
    if weights is None:
        model = auto.from_config(config, **options)
        wrapper = TransformersModel(model, classes, input_name, not is_language_model, pad)
    else:
        with torch.device("meta"):  # makes no weights
            of_type = type(auto.from_config(config))
        is_folder, tensors = weights.path.is_dir(), weights.read_tensors()  # its messages name a damaged file
        model, report = of_type.from_pretrained(
            weights.path if is_folder else None,
            config=config,
            state_dict=None if is_folder else dict(tensors),
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
        wrapper = TransformersModel(model.train(), classes, input_name, not is_language_model, pad)
        weights.check(_match_from_report(model, report, wrapper.peft_prefix), wrapper.head_names)
    if isinstance(input_shape, dict):
        accepted = signature(model.forward).parameters
        if unknown := [key for key in input_shape if key not in accepted]:
            raise UserError(
                f"model {name}: the samples have the tensor {unknown[0]!r}, which the model does not take; it takes "
                "input_ids and attention_mask"
            )
    return wrapper


def _image_values(input_shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the values of a configuration that depend on the images."""
    channels, *size = input_shape
    return {"num_channels": channels, "image_size": size[0] if len(set(size)) == 1 else list(size)}


def _check_text_shape(name: str, input_shape: Any, config: Any) -> None:
    """Raise UserError if texts are too long for a model."""
    shape = input_shape.get("input_ids", ()) if isinstance(input_shape, dict) else input_shape
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and shape and shape[0] > limit:
        raise UserError(
            f"model {name}: texts have {shape[0]} tokens, but the model takes at most {limit} "
            "(max_position_embeddings); shorten the texts"
        )


def _find_classifier(model: Any, prefix: str) -> set[str]:
    """Return the names of all parameters that are not part of the base model, each with a prefix."""
    base = model.base_model
    own = {id(parameter) for parameter in base.parameters()} if base is not model else set()
    return {f"{prefix}{name}" for name, parameter in model.named_parameters() if id(parameter) not in own}


def _match_from_report(model: nn.Module, report: Mapping[str, Any], prefix: str) -> TensorMatch:
    """Convert the loading report of `from_pretrained` into a `TensorMatch`.

    Args:
        model: the loaded model of the library.
        report: the missing, unexpected and mismatched keys.
        prefix: the prefix that the names of the model's tensors have in its wrapper, a `TransformersModel`.
    """
    shapes = {
        f"{prefix}{name}": (tuple(own), tuple(given), "") for name, given, own in sorted(report["mismatched_keys"])
    }
    random = {f"{prefix}{name}" for name in report["missing_keys"]} | shapes.keys()
    names = [f"{prefix}{name}" for name in model.state_dict()]
    fitting = [name for name in names if name not in random]
    return TensorMatch(fitting, shapes, sorted(report["unexpected_keys"]), sorted(random), len(names))
