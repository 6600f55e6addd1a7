from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("world", Path(__file__).with_name("world.py"))
assert _spec is not None
assert _spec.loader is not None
world = importlib.util.module_from_spec(_spec)
sys.modules["world"] = world
_spec.loader.exec_module(world)
