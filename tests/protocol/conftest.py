"""The tests of this folder import `atomic_batches`, a module of the folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
