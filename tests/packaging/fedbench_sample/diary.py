"""An observer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import fedbench


class Diary(fedbench.Observer):
    """Writes a line for every event to the file that $FEDBENCH_SAMPLE_DIARY names."""

    def cell_started(self, cell: Mapping[str, Any]) -> None:
        self._write("started", cell)

    def round_finished(self, cell: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        self._write(f"round {record['round']}", cell)

    def cell_finished(self, cell: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        self._write(str(result["status"]), cell)

    def _write(self, event: str, cell: Mapping[str, Any]) -> None:
        if path := os.environ.get("FEDBENCH_SAMPLE_DIARY"):
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps([event, cell["method"], cell["seed"]]) + "\n")
