"""Run the command-line interface, so that `python -m fedmpi` does the same as `fedmpi`."""

from fedmpi.cli import main

if __name__ == "__main__":
    main()
