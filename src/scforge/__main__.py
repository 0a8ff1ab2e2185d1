"""``python -m scforge`` is the command ``scforge``."""

import sys

from scforge.cli import main

sys.exit(main())
