"""Pictures of data sets for a person to look at: what `fedbench data show` writes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbench.cache import atomic_file
from fedbench.errors import UserError
from fedbench.interfaces import Samples

if TYPE_CHECKING:
    from PIL import Image

_TILE, _GAP = 112, 10
"""Side of a picture on the sheet and the space around it, in pixels."""
_ROWS = 2
"""Rows of pictures a section."""
_LINES = 4
"""Lines of a picture's label, at most."""
_LETTER, _LINE, _HEADING = 6, 14, 34
"""Width of a small letter, height of a small line and of a section's title, in pixels, about."""
_INK, _FAINT, _PAPER = (32, 34, 38), (96, 100, 108), (252, 252, 250)


def contact_sheet(
    sections: Sequence[tuple[str, Samples]], path: Path, *, columns: int = 12, attribution: str = ""
) -> None:
    """Write a PNG with a few items of each set: pictures with their labels or captions, and the views of one item.

    Args:
        sections: title and items of each set; sets without pictures are listed by their texts.
        path: of the PNG.
        columns: pictures in a row.
        attribution: authors and licences, written at the bottom.

    Raises:
        UserError: pillow is missing, or the file cannot be written.
    """
    if columns < 1:
        raise UserError(f"columns can't be {columns}", where="contact sheet", expected="1 or more")
    sheet = _Sheet(columns)
    for title, samples in sections:
        sheet.text(title, large=True)
        if "image" in samples.inputs:
            sheet.pictures(samples.inputs["image"][: columns * _ROWS, 0], samples)
            if samples.inputs["image"].shape[1] > 1:
                sheet.text("the views of the first item", faint=True)
                sheet.pictures(samples.inputs["image"][0, :columns])
        else:
            for row in range(min(len(samples), columns * _ROWS)):
                sheet.text(f"{samples.inputs['text'][row]}  [{label(samples, row)}]")
        sheet.space()
    if attribution:
        sheet.text(attribution, faint=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as handle:
            sheet.finished().save(handle, "PNG")
    except OSError as error:
        raise UserError(f"the contact sheet cannot be written: {error.strerror}", where=str(path)) from None


def label(samples: Samples, row: int) -> str:
    """What is said about an item: its class, its classes, or its caption."""
    if samples.targets is None:
        return str(samples.inputs["text"][row]) if "text" in samples.inputs else ""
    if samples.targets.ndim == 1:
        return samples.classes[int(samples.targets[row])]
    return ", ".join(samples.classes[number] for number in np.flatnonzero(samples.targets[row])) or "none"


class _Sheet:
    """A page that grows downwards: what is added is placed at once and drawn when the height is known."""

    def __init__(self, columns: int) -> None:
        try:
            from PIL import Image, ImageDraw, ImageFont
        except ModuleNotFoundError:
            raise UserError(
                "a contact sheet needs the package pillow", expected="run: pip install 'fedbench-suite[mini]'"
            ) from None
        self._image, self._draw = Image, ImageDraw
        self._small: Any = ImageFont.load_default(11)
        self._large: Any = ImageFont.load_default(20)
        self._columns = columns
        self._width = _GAP + columns * (_TILE + _GAP)
        self._top = _GAP
        self._texts: list[tuple[tuple[int, int], str, Any, tuple[int, int, int]]] = []
        self._tiles: list[tuple[tuple[int, int], np.ndarray]] = []

    def text(self, text: str, *, large: bool = False, faint: bool = False) -> None:
        """A paragraph or a title across the page."""
        letter = _LETTER * 2 if large else _LETTER
        for line in textwrap.wrap(text, max(8, self._width // letter)):
            font = self._large if large else self._small
            self._texts.append(((_GAP, self._top), line, font, _FAINT if faint else _INK))
            self._top += _HEADING if large else _LINE + 2

    def pictures(self, images: np.ndarray, samples: Samples | None = None) -> None:
        """Rows of pictures, uint8 (N, H, W, 3); with `samples`, their labels below."""
        for start in range(0, len(images), self._columns):
            rows = range(start, min(start + self._columns, len(images)))
            labels = [self._label(samples, row) if samples else [] for row in rows]
            for place, (row, lines) in enumerate(zip(rows, labels, strict=True)):
                left = _GAP + place * (_TILE + _GAP)
                self._tiles.append(((left, self._top), images[row]))
                for number, line in enumerate(lines):
                    at = (left, self._top + _TILE + 3 + number * _LINE)
                    self._texts.append((at, line, self._small, _INK))
            self._top += _TILE + _GAP + _LINE * max(map(len, labels))

    def space(self) -> None:
        """Some room between sections."""
        self._top += 2 * _GAP

    def finished(self) -> Image.Image:
        """The drawn page."""
        page = self._image.new("RGB", (self._width, self._top + _GAP), _PAPER)
        for at, pixels in self._tiles:
            tile = self._image.fromarray(np.ascontiguousarray(pixels))
            page.paste(tile.resize((_TILE, _TILE), self._image.Resampling.BICUBIC), at)
        draw = self._draw.Draw(page)
        for at, text, font, ink in self._texts:
            draw.text(at, text, font=font, fill=ink)
        return page

    def _label(self, samples: Samples, row: int) -> list[str]:
        return textwrap.wrap(label(samples, row), _TILE // _LETTER, max_lines=_LINES, placeholder=" …")
