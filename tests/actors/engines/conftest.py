"""What needs the library of suffix drafts is collected only where it is installed (the extra `suffix`)."""

from __future__ import annotations

import importlib.util

HAS_SUFFIX = importlib.util.find_spec("arctic_inference") is not None
collect_ignore = [] if HAS_SUFFIX else ["lookup/test_suffix_trees.py", "transformers/test_suffix_on_off.py"]
