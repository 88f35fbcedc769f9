"""The contact sheet: every section is on it, labels are the items' own, and bad requests are plain errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedbench.errors import UserError
from fedbench.interfaces import Samples

image_module = pytest.importorskip("PIL.Image")

from fedbench.contact_sheet import contact_sheet, label  # noqa: E402

COLOURS = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8)


def pictures(views: int) -> np.ndarray:
    images = np.zeros((3, views, 8, 8, 3), np.uint8)
    images[:] = COLOURS[:, None, None, None, :]
    images[0, 1:] = (255, 0, 255)
    return images


def single(views: int = 1) -> Samples:
    return Samples("one", {"image": pictures(views)}, np.array([2, 0, 1]), np.arange(3), ("ant", "bee", "cat"))


def present(path: Path) -> set[tuple[int, ...]]:
    pixels = np.asarray(image_module.open(path)).reshape(-1, 3)
    return {tuple(colour) for colour in np.unique(pixels, axis=0).tolist()}


def test_shows_every_picture_and_the_views_of_the_first(tmp_path: Path) -> None:
    contact_sheet([("train", single(2))], tmp_path / "sheet.png", columns=2)
    assert {(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 0, 255)} <= present(tmp_path / "sheet.png")
    contact_sheet([("test", single(1))], tmp_path / "plain.png", columns=2)
    assert (255, 0, 255) not in present(tmp_path / "plain.png")


def test_grows_with_sections_and_attribution(tmp_path: Path) -> None:
    heights = []
    for number, (sections, attribution) in enumerate((([("a", single())], ""), ([("a", single())] * 2, "by " * 90))):
        path = tmp_path / "new" / f"{number}.png"
        contact_sheet(sections, path, columns=3, attribution=attribution)
        heights.append(image_module.open(path).size[1])
    assert heights[1] > 2 * heights[0]


def test_labels() -> None:
    assert [label(single(), row) for row in range(3)] == ["cat", "ant", "bee"]
    targets = np.array([[1, 0, 1], [0, 0, 0]], np.uint8)
    several = Samples("several", {"image": pictures(1)[:2]}, targets, np.arange(2), ("ant", "bee", "cat"))
    assert [label(several, row) for row in range(2)] == ["ant, cat", "none"]
    public = Samples("public", {"text": np.array(["a cat beside an ant"])}, None, np.arange(1))
    assert label(public, 0) == "a cat beside an ant"


def test_a_set_of_texts_is_listed(tmp_path: Path) -> None:
    texts = Samples("texts", {"text": np.array(["long words " * 40, "b"])}, np.array([0, 1]), np.arange(2), ("x", "y"))
    contact_sheet([("texts", texts)], tmp_path / "sheet.png")
    assert len(present(tmp_path / "sheet.png")) > 2


def test_bad_requests_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="columns"):
        contact_sheet([("a", single())], tmp_path / "sheet.png", columns=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        contact_sheet([("a", single())], tmp_path / "file" / "sheet.png")
