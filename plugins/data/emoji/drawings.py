"""The vendors' drawings as pixels of one size."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import resvg_py
from PIL import Image

from fedbench.cache import Cache
from fedbench.errors import UserError
from fedbench_plugins.data.emoji.catalogue import STYLES, Catalogue
from fedbench_plugins.data.emoji.packages import REINSTALL

_FAINT = 8
"""Alpha below which a pixel does not count as part of a drawing."""


def drawings(catalogue: Catalogue, pixels: int, key: str, cache: Cache) -> np.ndarray:
    """All drawings: uint8 (concepts, styles, pixels, pixels, 4), RGBA, each filling its square.

    Vendors leave different margins, so each drawing is cut to what is visible and scaled to the square.

    Args:
        catalogue: whose drawings.
        pixels: side of a drawing.
        key: names the files and the versions of the renderers.
        cache: keeps the result.

    Raises:
        UserError: a file is not a picture.
    """
    return cache.array(f"emoji drawings, {key}, {pixels} pixels", lambda: _draw(catalogue, pixels))


def _draw(catalogue: Catalogue, pixels: int) -> np.ndarray:
    readers: tuple[Callable[[bytes], Image.Image], ...] = (_raster, lambda content: _vector(content, 2 * pixels))
    result = np.zeros((len(catalogue.concepts), len(STYLES), pixels, pixels, 4), np.uint8)
    for number, concept in enumerate(catalogue.concepts):
        for style, (name, read) in enumerate(zip(concept.files, readers, strict=True)):
            path = catalogue.files[name]
            try:
                picture = read(path.read_bytes())
            except (OSError, ValueError) as error:
                raise UserError(f"not a picture: {error}", where=str(path), expected=REINSTALL) from None
            result[number, style] = np.asarray(_fitted(picture, pixels))
    return result


def _raster(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGBA")


def _vector(content: bytes, pixels: int) -> Image.Image:
    # System fonts would let the machine's fonts into the pixels.
    return _raster(resvg_py.svg_to_bytes(svg_string=content.decode(), width=pixels, skip_system_fonts=True))


def _fitted(picture: Image.Image, pixels: int) -> Image.Image:
    """The visible part, scaled so that its longer side fills the square, centred."""
    visible = picture.getchannel("A").point([255 * (alpha >= _FAINT) for alpha in range(256)]).getbbox()
    part = picture.crop(visible)
    scale = pixels / max(part.size)
    part = part.resize(
        (max(1, round(part.width * scale)), max(1, round(part.height * scale))), Image.Resampling.LANCZOS
    )
    square = Image.new("RGBA", (pixels, pixels))
    square.paste(part, ((pixels - part.width) // 2, (pixels - part.height) // 2))
    return square
