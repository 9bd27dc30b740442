"""On the path of a copy: the virtual environment knows the checkout's packages, which must not be found there."""

import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
