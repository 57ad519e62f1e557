"""Reading the keys of sites."""

import subprocess

import pytest

from fedmpi.common.errors import UserError
from fedmpi.privacy.site_keys import CREATE_PRIVATE, CREATE_PUBLIC, load_identity, load_public_keys

SITES = ("lyon", "oslo")


@pytest.fixture
def folder(tmp_path):
    """Return a folder with keys that the commands in messages have created."""
    for site in SITES:
        for command in (CREATE_PRIVATE.format(path=f"{site}.key"), CREATE_PUBLIC.format(path=f"{site}.pub")):
            subprocess.run(command.replace("SITE", site).split(), cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


def test_a_signature_of_a_site_belongs_to_its_public_key(folder):
    public = load_public_keys(folder, SITES)
    for i, site in enumerate(SITES):
        key = load_identity(folder / f"{site}.key", site, public[i])
        public[i].verify(key.sign(b"text"), b"text")


def test_wrong_public_keys_are_refused(folder):
    with pytest.raises(UserError, match=r"privacy.keys: .*bern.pub: No such file.*site bern creates it with: openssl"):
        load_public_keys(folder, (*SITES, "bern"))
    (folder / "bern.pub").write_bytes((folder / "oslo.pub").read_bytes())
    with pytest.raises(UserError, match=r"bern.pub is the key of site oslo, too; each site needs its own"):
        load_public_keys(folder, (*SITES, "bern"))
    (folder / "bern.pub").write_text("key")
    with pytest.raises(UserError, match=r"bern.pub does not contain an Ed25519 public key in PEM format"):
        load_public_keys(folder, (*SITES, "bern"))


def test_wrong_private_keys_are_refused(folder):
    public = load_public_keys(folder, SITES)
    with pytest.raises(UserError, match=r"lyon.key does not belong to oslo.pub in privacy.keys"):
        load_identity(folder / "lyon.key", "oslo", public[1])
    with pytest.raises(UserError, match=r"privacy.identity: .*none: No such file.*private key of site lyon; create it"):
        load_identity(folder / "none", "lyon", public[0])
    (folder / "lyon.pub").chmod(0o600)
    with pytest.raises(UserError, match="does not contain an Ed25519 private key in PEM format without a password"):
        load_identity(folder / "lyon.pub", "lyon", public[0])
    (folder / "lyon.key").chmod(0o644)
    with pytest.raises(UserError, match=r"other users may read .*lyon.key; run chmod 600"):
        load_identity(folder / "lyon.key", "lyon", public[0])
