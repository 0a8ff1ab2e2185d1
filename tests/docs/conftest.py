"""The generators of the documentation, which live beside it."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
for folder in (ROOT / "docs" / "_ext", ROOT / "tools"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
