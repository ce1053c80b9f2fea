"""A canvas on which the small environments draw themselves."""

from collections.abc import Sequence
from typing import TypeAlias, final

import numpy as np
from jaxtyping import UInt8

_OVERSAMPLING = 3  # drawn this much larger, then scaled down, so that edges are smooth

Point: TypeAlias = Sequence[float] | np.ndarray


@final
class Canvas:
    """A white picture, drawn on in the coordinates of the world: x to the right, y up.

    **Arguments:**

    - `height`, `width`: of the picture, in pixels.
    - `center`: the point in its middle.
    - `extent`: the length that its shorter side shows.

    **Raises:** `ImportError` without Pillow.
    """

    def __init__(self, height: int, width: int, center: Point, extent: float):
        try:
            from PIL import Image, ImageDraw
        except ImportError as error:
            raise ImportError(
                'Drawing needs Pillow. Install it with `pip install "eqx-ppo[video]"`.'
            ) from error
        self._image = Image.new("RGB", (width * _OVERSAMPLING, height * _OVERSAMPLING), "white")
        self._draw = ImageDraw.Draw(self._image)
        self._center = center
        self._scale = _OVERSAMPLING * min(height, width) / extent

    def disk(self, center: Point, radius: float, color: str) -> None:
        """A filled disk."""
        x, y = self._pixel(center)
        reach = radius * self._scale
        self._draw.ellipse((x - reach, y - reach, x + reach, y + reach), fill=color)

    def rod(self, start: Point, end: Point, width: float, color: str) -> None:
        """A line with round ends."""
        thickness = round(width * self._scale)
        self._draw.line((*self._pixel(start), *self._pixel(end)), fill=color, width=thickness)
        for point in (start, end):
            self.disk(point, width / 2, color)

    def picture(self) -> UInt8[np.ndarray, "height width 3"]:
        """What was drawn, as RGB."""
        return np.array(self._image.reduce(_OVERSAMPLING))

    def _pixel(self, point: Point) -> tuple[float, float]:
        width, height = self._image.size
        x, y = (self._scale * float(point[axis] - self._center[axis]) for axis in (0, 1))
        return width / 2 + x, height / 2 - y
