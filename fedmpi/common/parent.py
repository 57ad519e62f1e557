"""The process that started this one, as it was when fedmpi was imported: later it may have died."""

import os

PID = os.getppid()
