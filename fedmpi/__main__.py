"""Run the command line interface: `python -m fedmpi` does the same as `fedmpi`."""

from fedmpi.cli import main

if __name__ == "__main__":
    main()
