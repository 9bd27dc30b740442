"""`outbox sink` for spark-submit, which runs a file: `spark-submit --master … outbox/submit/sink.py orders`.

The file is alone in its folder, because Python looks for modules there first.
"""

from __future__ import annotations

import sys

from outbox.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "sink")
    main()
