"""Says which warnings it was told to look out for."""

import sys

print(sys.warnoptions)
