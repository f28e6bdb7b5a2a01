"""Makes the publishers' rows (sft_rows) importable for all tests of SFT data."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
