"""Download public data sets: their files, URLs and checksums, and the commands `fedmpi data list | check | fetch`.

This package does not import torch, so that the commands start quickly on a login node, which is often the only node
with internet access.
"""
