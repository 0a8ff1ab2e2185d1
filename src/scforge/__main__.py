"""Run the command ``scforge`` with ``python -m scforge``."""

import sys

from scforge.cli import main

sys.exit(main())
