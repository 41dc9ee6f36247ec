"""The cases are a plain module beside the tests, which importlib mode does not put on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
