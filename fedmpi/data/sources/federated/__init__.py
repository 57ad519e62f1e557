"""Sources whose files hold the samples of each client under its name: LEAF's JSON and HDF5."""
