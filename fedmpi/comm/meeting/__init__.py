"""Where the ranks of a job find each other: a store behind a door."""
