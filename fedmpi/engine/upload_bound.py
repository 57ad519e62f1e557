"""The bound on the uploads of clients under differential privacy of clients (privacy.dp.unit: client)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedmpi.engine.messages import CLIP, UNCLIPPED, UploadLayout
from fedmpi.privacy.client_level import clip_vector

ClientContext = Any  # the class in local/client_context.py


def bound_upload(client: ClientContext, row: Tensor, upload: UploadLayout) -> None:
    """Clip everything that a client uploads as one vector, in place.

    Float buffers are replaced by their change, because the noise is proportional to the bound on what a client sends.

    Args:
        row: the upload of the client, without the engine's own fields.
    """
    if upload.b.size:
        upload.packing.view(row, "_b").sub_(upload.b.take(client.b0))
    within = clip_vector(row[upload.payload_start :], getattr(client.downloads, CLIP))
    if UNCLIPPED in upload.packing.spans:
        upload.packing.write(row, {UNCLIPPED: within})
