"""Where the ranks of a job find each other: an authenticated store at rank 0."""
