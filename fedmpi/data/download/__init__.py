"""Public data sets: their files, addresses and checksums, for the commands `fedmpi data list | check | fetch`.

This package does not import torch, so that the commands answer at once on a login node, which often is the only node
with internet access.
"""
