"""For a process that imports everything itself: what it starts is asked of the launcher."""

import os
import sys

sys.executable = os.environ.get("TESTS_PYTHON", sys.executable)
