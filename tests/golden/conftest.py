from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

for _name, _path in (("world", Path(__file__).parents[1] / "core" / "world.py"), ("transcript", Path(__file__).with_name("transcript.py"))):
    if _name not in sys.modules:
        _spec = importlib.util.spec_from_file_location(_name, _path)
        assert _spec is not None
        assert _spec.loader is not None
        sys.modules[_name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_name])
