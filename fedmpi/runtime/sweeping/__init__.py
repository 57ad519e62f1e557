"""Many runs of one file: which are done, and doing the others side by side."""
