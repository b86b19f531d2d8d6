"""Which trouble is wanted now. The test writes it to a file, and whoever makes trouble follows the file.

The file is read by a thread of its own, because no other thread of a tier may wait for a file. Each reader says what it
has read in a file beside it, so that the test knows when everybody obeys.
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

VARIABLE = "TROUBLE_ORDERS"  # the environment variable that names the file


class Orders:
    """Follows the file in the name of `reader`. `now` is the order in force, an object of strings and numbers."""

    def __init__(self, reader: str) -> None:
        self.now: dict[str, Any] = {}
        self._file = Path(os.environ[VARIABLE])
        self._obeyed = self._file.with_name(f"{reader}.obeyed")
        threading.Thread(target=self._follow, name="orders", daemon=True).start()

    def _follow(self) -> None:
        seen = ""
        while True:
            text = self._file.read_text()
            if text != seen:
                self.now = json.loads(text)
                self._obeyed.write_text(text)
                seen = text
            time.sleep(0.01)
