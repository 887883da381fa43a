"""Pages to look for: docstrings of the standard library, printed as images.

    python -m training_recipes.stdlib_pages page.png        # the first page, to look at

The query is the first sentence of a docstring, the page shows its object's name and the rest of the text, as a page of
a manual would. Everything is drawn here, so nothing is downloaded.
"""

from __future__ import annotations

import sys
import textwrap

from datasets import Dataset, Features, Image, Value
from PIL import Image as Picture
from PIL import ImageDraw, ImageFont

from training_recipes.stdlib_docstrings import load_pairs, words

PAGES = 32
MIN_WORDS = 60  # else a page is all but empty
WIDTH, HEIGHT = 336, 448  # pixels, upright as paper is
MARGIN, COLUMNS, LINES = 14, 46, 34  # of text in the default font at its size 11


def load_pages(count: int = PAGES) -> Dataset:
    """Return the columns `query` and `positive`, a page for every so many-th training docstring.

    Args:
        count: Rows; they are spread over the library, so that pages differ in what they are about.
    """
    pairs = [pair for pair in load_pairs() if pair.split == "train" and words(pair.document) >= MIN_WORDS]
    chosen = pairs[:: max(1, len(pairs) // count)][:count]
    rows = {
        "query": [pair.query for pair in chosen],
        "positive": [draw_page(pair.name, pair.document) for pair in chosen],
    }
    return Dataset.from_dict(rows, features=Features({"query": Value("string"), "positive": Image()}))


def draw_page(title: str, text: str) -> Picture.Image:
    """Print a title and a text on a white page; what does not fit is cut."""
    page = Picture.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(page)
    pen.text(
        (MARGIN, MARGIN), textwrap.shorten(title, COLUMNS, placeholder="..."), "black", ImageFont.load_default(13)
    )
    pen.line((MARGIN, MARGIN + 20, WIDTH - MARGIN, MARGIN + 20), "black")
    lines = textwrap.wrap(text, COLUMNS)[: LINES - 4]
    pen.multiline_text((MARGIN, MARGIN + 28), "\n".join(lines), "black", ImageFont.load_default(11))
    return page


if __name__ == "__main__":
    load_pages(1)[0]["positive"].save(sys.argv[1])
