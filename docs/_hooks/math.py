"""Turns the formulas of a page into MathML, so that reading it needs no script."""

import html
import re

from latex2mathml.converter import convert

_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)


def on_page_content(content: str, **_: object) -> str:
    """Replaces what `pymdownx.arithmatex` marked; called by MkDocs for each page."""

    def to_mathml(match: re.Match[str]) -> str:
        display = "block" if match["tag"] == "div" else "inline"
        return convert(html.unescape(match["latex"]), display=display)

    return _FORMULA.sub(to_mathml, content)
