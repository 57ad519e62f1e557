"""Convert texts to tokens with a tokenizer of Hugging Face transformers that is stored in a local folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.text import shorten
from fedmpi.data.sources.texts import IGNORE_INDEX

TEXTS_PER_CALL = 1000  # limits the memory of temporary lists
FILE_NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """A tokenizer and the identity of its files.

    Attributes:
        folder: the folder of the tokenizer, as the user wrote it.
        backend: the tokenizer object of transformers.
        digest: a short digest of the tokenizer's files.
    """

    folder: Path
    backend: Any
    digest: str

    def __len__(self) -> int:
        return len(self.backend)

    @property
    def pad_id(self) -> int:
        """The number of the token with which short texts are padded: the pad token or, without one, the eos token."""
        number = self.backend.pad_token_id
        if number is None:
            raise UserError(
                f"data.tokenizer: the tokenizer in {self.folder} has neither a pad token nor an eos token, so texts of "
                "different lengths cannot be padded; set pad_token in its tokenizer_config.json"
            )
        return int(number)

    def check_max_length(self, max_length: int, pairs: bool = False) -> None:
        """Raise UserError if data.max_length is not valid for the tokenizer. pairs: whether a sample has two texts."""
        largest = self.backend.model_max_length
        if max_length > largest:
            raise UserError(
                f"data.max_length: {max_length} is larger than the {largest} tokens that the tokenizer in "
                f"{self.folder} allows; lower it, or correct model_max_length in its tokenizer_config.json"
            )
        special = self.backend.num_special_tokens_to_add(pair=pairs)
        if max_length <= special:
            raise UserError(
                f"data.max_length: {max_length} leaves no room for a text, because the tokenizer in {self.folder} adds "
                f"{special} special tokens; set it to at least {special + 1}"
            )

    def encode(self, columns: Sequence[Sequence[str]], max_length: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Convert texts, or pairs of texts, to token numbers.

        Args:
            columns: one or two lists of n texts.
            max_length: longer texts are truncated to this number of tokens; shorter ones are padded to it.

        Returns:
            The arrays `input_ids` and `attention_mask`, (n, max_length) int64, and for pairs also `token_type_ids` if
            the tokenizer distinguishes the texts of a pair; and whether each text was truncated, (n,) bool.
        """
        assert self.pad_id >= 0  # raises UserError if texts cannot be padded
        parts: list[dict[str, np.ndarray]] = []
        truncated: list[np.ndarray] = []
        for texts in _iter_chunks(columns):
            encoded = self.backend(
                *texts,
                truncation=True,
                max_length=max_length,
                padding="max_length",
                return_attention_mask=True,
                return_tensors="np",
                verbose=False,
            )
            names = ["input_ids", "attention_mask", *(["token_type_ids"] if len(columns) == 2 else [])]
            parts.append({name: encoded[name].astype(np.int64) for name in names if name in encoded})
            truncated.append(self._find_truncated(texts, parts[-1]["attention_mask"]))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, np.concatenate(truncated)

    def _find_truncated(self, texts: Sequence[Sequence[str]], mask: np.ndarray) -> np.ndarray:
        """Return whether each text, or pair of texts, was truncated to max_length tokens, (n,) bool.

        mask: the attention mask of the tokens after truncation, (n, max_length).
        """
        truncated, full = np.zeros(len(mask), dtype=bool), np.flatnonzero(mask.all(1)).tolist()
        if full:
            ids = self.backend(*([column[row] for row in full] for column in texts), verbose=False)["input_ids"]
            truncated[full] = [len(tokens) > mask.shape[1] for tokens in ids]
        return truncated

    def encode_for_next_token(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token numbers of each text, (t,) int64, with the eos token at the end if the tokenizer has one."""
        end, tokens = self.backend.eos_token_id, []
        for (chunk,) in _iter_chunks([texts]):
            for ids in self.backend(chunk, return_attention_mask=False, verbose=False)["input_ids"]:
                tokens.append(np.array(ids if end is None or ids[-1:] == [end] else [*ids, end], dtype=np.int64))
        return tokens

    def cut_blocks(self, tokens: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Cut a sequence of tokens into blocks for the prediction of the next token; the last block is padded.

        Args:
            tokens: the token numbers, (t,).
            length: the number L of tokens in a block.

        Returns:
            Arrays (blocks, L): `input_ids`, `attention_mask`, and `y` with the token after each token, IGNORE_INDEX for
            the padding. Each token except the first is a target exactly once.
        """
        pairs = max(len(tokens) - 1, 0)
        blocks = max(-(-pairs // length), 1)
        ids, y = np.full(blocks * length, self.pad_id), np.full(blocks * length, IGNORE_INDEX)
        ids[:pairs], y[:pairs] = tokens[: len(tokens) - 1], tokens[1:]
        mask = (np.arange(blocks * length) < pairs).astype(np.int64)
        arrays = {"input_ids": ids, "attention_mask": mask, "y": y}
        return {name: array.reshape(blocks, length) for name, array in arrays.items()}


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Load the tokenizer in a folder that `save_pretrained` has written; nothing is downloaded, and no code is run.

    Raises:
        UserError: transformers is not installed, or the folder does not contain a tokenizer.
    """
    place = folder.expanduser()
    advice = "it must be a folder with the tokenizer of a model, as tokenizer.save_pretrained(FOLDER) writes it"
    if not place.is_dir():
        problem = "is not a folder" if place.exists() else "does not exist"
        raise UserError(f"data.tokenizer: {folder} {problem} (relative to {Path.cwd()}); {advice}")
    if find_spec("transformers") is None:
        raise UserError("data.tokenizer needs transformers, which is not installed; pip install 'fedmpi[hf]'")
    import_module("fedmpi.common.torchvision_compat")  # before transformers, which imports torchvision
    from transformers import AutoTokenizer  # imported here, because the import takes seconds

    try:
        backend = AutoTokenizer.from_pretrained(str(place), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged files and missing packages raise many errors
        reason = shorten(" ".join(str(error).split()), 300)
        raise UserError(f"data.tokenizer: {folder} cannot be read as a tokenizer: {reason}; {advice}") from error
    if backend.pad_token is None:
        backend.pad_token = backend.eos_token
    names = {*FILE_NAMES, *backend.vocab_files_names.values()}
    sha256 = hashlib.sha256()
    for path in sorted(place / name for name in names):
        if path.is_file():
            sha256.update(path.name.encode() + b"\0" + path.read_bytes())
    return TextTokenizer(folder, backend, sha256.hexdigest()[:16])


def _iter_chunks(columns: Sequence[Sequence[str]]) -> Iterator[list[list[str]]]:
    """Yield TEXTS_PER_CALL rows of all columns at a time."""
    for start in range(0, len(columns[0]), TEXTS_PER_CALL):
        yield [list(column[start : start + TEXTS_PER_CALL]) for column in columns]
