"""Which files a data set is made of, where they come from and where they go: `fedmpi data list | check | fetch`.

Nothing here imports torch: a login node, which alone reaches the internet, answers at once.
"""
