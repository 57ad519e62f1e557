"""The Ed25519 keys by which sites sign their messages: a folder of public keys, and one private key for each site.

A site creates its keys with

    openssl genpkey -algorithm ed25519 -out SITE.key
    openssl pkey -in SITE.key -pubout -out SITE.pub
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from fedmpi.common.errors import UserError

CREATE_PRIVATE = "openssl genpkey -algorithm ed25519 -out {path}"
CREATE_PUBLIC = "openssl pkey -in SITE.key -pubout -out {path}"


def load_public_keys(folder: Path, sites: Sequence[str]) -> dict[int, Ed25519PublicKey]:
    """Read the public key of each site from a folder; return the position of the site in `sites` -> its key.

    Raises:
        UserError: a file SITE.pub is missing, contains no Ed25519 key, or two sites have the same key.
    """
    keys, owners = dict[int, Ed25519PublicKey](), dict[bytes, str]()
    for i, site in enumerate(sites):
        path = folder / f"{site}.pub"
        create = f"site {site} creates it with: {CREATE_PUBLIC.format(path=path.name)}"
        try:
            key = load_pem_public_key(path.read_bytes())
        except OSError as error:
            raise UserError(f"privacy.keys: {path}: {error.strerror or error}; {create}") from error
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, Ed25519PublicKey):
            raise UserError(f"privacy.keys: {path} does not contain an Ed25519 public key in PEM format; {create}")
        owner = owners.setdefault(key.public_bytes_raw(), site)
        if owner != site:
            raise UserError(f"privacy.keys: {path} is the key of site {owner}, too; each site needs its own; {create}")
        keys[i] = key
    return keys


def load_identity(path: Path, site: str, public: Ed25519PublicKey) -> Ed25519PrivateKey:
    """Read the private key of this site.

    Args:
        site: the name of the site, for messages.
        public: the public key of the site, to which the private key must belong.

    Raises:
        UserError: the file cannot be read, other users can read it, or its key is not an Ed25519 key of this site.
    """
    create = f"create it with: {CREATE_PRIVATE.format(path=path)}"
    try:
        with path.open("rb") as file:
            shared, text = os.fstat(file.fileno()).st_mode & 0o077, file.read()
    except OSError as error:
        raise UserError(
            f"privacy.identity: {path}: {error.strerror or error}. This file holds the private key of site {site}; "
            f"{create}"
        ) from error
    if shared:
        raise UserError(f"privacy.identity: other users may read {path}; run chmod 600 {path}")
    try:
        key = load_pem_private_key(text, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(
            f"privacy.identity: {path} does not contain an Ed25519 private key in PEM format without a password; "
            f"{create}"
        )
    if key.public_key().public_bytes_raw() != public.public_bytes_raw():
        raise UserError(
            f"privacy.identity: {path} does not belong to {site}.pub in privacy.keys; use the private key of site "
            f"{site}, or replace {site}.pub at all sites"
        )
    return key
