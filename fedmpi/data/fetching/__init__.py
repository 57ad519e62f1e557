"""The public data sets: their files, addresses and checksums, and the commands `fedmpi data list | check | fetch`.

Nothing here imports torch: a login node, which alone reaches the internet, answers at once.
"""
