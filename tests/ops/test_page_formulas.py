"""Formulas on the page at `/`: what is one, what is none, and what they must not do."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Page
from tests.support.chat_page import (
    DESKTOP,
    PHONE,
    NewPage,
    answers,
    asked,
    finished,
    opened,
    send,
    use,
)
from tests.support.page_server import PageServer, running_page_server

# SCREENSHOTS=folder keeps screenshots.
_SCREENSHOTS = os.environ.get("SCREENSHOTS")
_CONVERSATION = "document.querySelector('#conversation')"


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with running_page_server() as server:
        yield server


@pytest.fixture
def page(server: PageServer, new_page: NewPage) -> Iterator[Page]:
    """After each test: no console errors, which include violations of the policy, and no requests
    to elsewhere."""
    page = opened(new_page(), server.url)
    yield page
    assert page.console_errors() == []
    assert all(url.startswith(server.url + "/") for url in page.urls())


def shown(page: Page, server: PageServer, text: str) -> None:
    server.says(text)
    asked(page, "Go on.")


_FORMULAS = """import("/page/text/markdown.js").then(({ allElementsOf }) => {
  const root = document.createElement("div");
  root.append(...allElementsOf(TEXT));
  return [...root.querySelectorAll(".formula")].map((e) => [
    e.classList.contains("alone") ? "alone" : "inside",
    e.querySelector("annotation")?.textContent
      ?? e.textContent.replace(/^(\\$\\$?|\\\\.)|(\\$\\$?|\\\\.)$/g, ""), // not loaded yet
  ]);
})"""


def formulas(page: Page, text: str) -> list[list[str]]:
    """[kind, TeX] of the formulas in a text."""
    found: list[list[str]] = page.js(_FORMULAS.replace("TEXT", json.dumps(text)))
    return found


@pytest.fixture(scope="module")
def reader(server: PageServer, new_page: NewPage) -> Page:
    """One page for all texts that are only read."""
    return opened(new_page(), server.url)


@pytest.fixture
def with_katex(page: Page, server: PageServer) -> Page:
    shown(page, server, "$x$")
    page.wait("document.querySelector('.katex')")
    return page


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"Let $x$ be.", [["inside", "x"]]),
        (r"Let \(x\) be, \(y\)!", [["inside", "x"], ["inside", "y"]]),
        ("$$\nx\n- y\n$$", [["alone", "\nx\n- y\n"]]),
        ("Then\n\\[\nx\n= y\n\\]\nfollows.", [["alone", "\nx\n= y\n"]]),
        (r"Then $$x$$, or \[y\].", [["alone", "x"], ["alone", "y"]]),
        ("\\[\nx\n\\] where $y$ is", [["alone", "\nx\n"], ["inside", "y"]]),
        ("- $$\n  x\n  $$\n- $y$", [["alone", "\nx\n"], ["inside", "y"]]),
        ("| a |\n|---|\n| $x_1 y_1$ |", [["inside", "x_1 y_1"]]),
        (r"**$a*b*c$** and $a_1$-th", [["inside", "a*b*c"], ["inside", "a_1"]]),
        (r"$2 \text{ if } x$ and $2x + 3$", [["inside", r"2 \text{ if } x"], ["inside", "2x + 3"]]),
        (r"$\text{US\$}$", [["inside", r"\text{US\$}"]]),
        (r"\[a \\[2pt] b\]", [["alone", r"a \\[2pt] b"]]),
        (r"[$x$](https://a.example) \(y\) \(z", [["inside", "x"], ["inside", "y"]]),
    ],
)
def test_what_stands_between_delimiters_is_a_formula(
    reader: Page, text: str, found: list[list[str]]
) -> None:
    assert formulas(reader, text) == found


@pytest.mark.parametrize(
    "text",
    [
        "It costs $5 and $10.",
        "Between $5-$10, $20/$30 or 5$/6$.",
        "That is $5 per month in US$ or CA$.",
        "It is $1,000 (US$), and A$5.",
        "Set $HOME and $PATH, or $HOME/$USER.",
        "$ is cheap, $$ is fine, $$$ is expensive.",
        "$$ - moderate\n$$$ - expensive\n\nand $$",
        "Costs $5 `x$` here.",
        r"Write \$x\$ for it.",
        r"Open \( and [ and \\(x\\).",
        "`$x$` and\n\n```\n$$x$$\n```",
        "$a\nb$ and $ a $ and $$ $$",
        "    $$x$$",
        "$$\nunclosed\n\nx",
    ],
)
def test_money_variables_and_code_are_no_formulas(reader: Page, text: str) -> None:
    assert formulas(reader, text) == []


def test_a_formula_is_drawn_with_its_own_fonts_and_read_out(page: Page, server: PageServer) -> None:
    shown(page, server, r"The vector $\vec{x} \in \mathbb{R}^n$ and $$\sqrt{\frac{a}{b}}$$")
    page.wait("document.querySelectorAll('.content .katex').length === 2")
    page.wait("[...document.fonts].some((f) => f.family === 'KaTeX_AMS' && f.status === 'loaded')")
    assert page.js("document.querySelector('.katex math').textContent").startswith("x⃗∈Rn")
    # In markup, the page's policy would not apply the heights.
    assert page.js("document.querySelector('.katex-strut').getBoundingClientRect().height") > 5
    assert all(url.endswith(".woff2") for url in page.urls() if "/fonts/" in url)


def test_katex_is_not_fetched_for_until_there_is_a_formula(page: Page, server: PageServer) -> None:
    shown(page, server, "It costs $5.")
    assert not any(name in url for url in page.urls() for name in ("katex.js", "woff2"))
    shown(page, server, "$x$")
    page.wait("document.querySelector('.katex')")
    assert any("katex.js" in url for url in page.urls())


def test_what_katex_does_not_understand_stays_as_it_was_written(
    with_katex: Page, server: PageServer
) -> None:
    for text in (
        r"$\frac{1$",
        r"$$\unknown{x}$$",
        "$" + "{" * 4000 + "$",
        r"\(" + "x" * 6000 + r"\)",
    ):
        shown(with_katex, server, text)
        assert answers(with_katex)[-1] == text


def test_a_formula_appears_while_the_answer_arrives_and_is_copied_as_tex(
    page: Page, server: PageServer
) -> None:
    text = r"Then $a^2 + b^2$ is:" + "\n\n$$\nc^2\n$$\n\n" + "And more text. " * 60
    server.says(text, pause_s=0.01)
    send(page, "Go on.")
    page.wait("document.querySelectorAll('.answer.running .katex').length === 2")
    page.js("window.first = document.querySelector('.katex'); 0")
    finished(page)
    assert page.js("first.isConnected && document.querySelectorAll('.katex').length === 2")
    page.call("Page.bringToFront")
    use(page, "Copy")
    page.write("#prompt", "")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="v", commands=["paste"])
    assert page.js("document.querySelector('#prompt').value") == text


def test_a_formula_covers_nothing_outside_its_answer(with_katex: Page, server: PageServer) -> None:
    cover = r"\smash{\rule[-5em]{50em}{5em}}"
    for text in (f"${cover}$", f"$${cover}$$"):
        shown(with_katex, server, text)
    covering = with_katex.js(
        "[...document.querySelectorAll('header, #chats, .said, .tools, #ask')].filter((e) => {"
        "const b = e.getBoundingClientRect();"
        "return b.bottom > 0 && document.elementsFromPoint(b.x + b.width / 2, b.y + b.height / 2)"
        ".some((at) => at.closest('.formula')); }).map((e) => e.outerHTML)"
    )
    assert with_katex.js("document.querySelectorAll('.katex').length") == 3
    assert covering == []
    assert with_katex.js(f"{_CONVERSATION}.scrollWidth <= {_CONVERSATION}.clientWidth")


@pytest.mark.parametrize(
    "tex",
    [
        r"\def\a{" + "x" * 100 + r"}\def\b{" + r"\a" * 30 + "}" + r"\b" * 30,
        r"\newcommand\a{" + "x" * 2000 + "}" + r"\a" * 45,
        r"\global\let\b=\def \b\a{" + "x" * 100 + r"}\b\c{" + r"\a" * 30 + "}" + r"\c" * 30,
    ],
    ids=["def", "newcommand", "let"],
)
def test_macros_that_expand_without_end_stay_as_they_were_written(
    with_katex: Page, server: PageServer, tex: str
) -> None:
    """With 236 characters the page answered nothing for longer than twenty seconds."""
    shown(with_katex, server, f"$${tex}$$")
    assert answers(with_katex)[-1] == f"$${tex}$$"
    shown(with_katex, server, r"$$\def\a{x+}\a\a y$$")
    with_katex.wait(f"[...{_CONVERSATION}.querySelectorAll('.katex')].length === 2")


def test_a_text_of_openers_without_closers_is_read_once(page: Page) -> None:
    """Searched for each of them, it would take minutes, and the browser's answer comes too late."""
    for opener in ("\\(", "\\[", "$ "):
        assert formulas(page, "x " + opener * 100_000) == []


_WIDE = " + ".join(f"a_{{{i}}}" for i in range(30))
_SHOWCASE = r"""Inline: $E = mc^2$, $\vec{x} \in \mathbb{R}^n$ and \(\mathcal{L}(\theta)\)
cost $5 and $10.

$$
x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}, \quad \sum_{i=1}^{n} i = \frac{n(n+1)}{2} \tag{1}
$$

\[
\begin{pmatrix} a & b \\ c & d \end{pmatrix}
\left(\frac{\frac{a}{b}}{c}\right)
f(n) = \begin{cases} n/2 & \text{if } n \text{ is even} \\ 3n+1 & \text{otherwise} \end{cases}
\]

- A list: $\int_0^\infty e^{-x^2}\,dx = \frac{\sqrt{\pi}}{2}$
- $\boxed{42}$ and $\color{red}{x}$

| a | b |
|---|---|
| $x_1$ | $\overline{AB}$ |

"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_wide_formula_scrolls_and_the_page_does_not(
    page: Page, server: PageServer, scheme: str, size: tuple[int, int]
) -> None:
    page.emulate(width=size[0], height=size[1], scheme=scheme)
    shown(page, server, f"{_SHOWCASE}\n$${_WIDE}$$\n")
    page.wait("document.querySelectorAll('.katex').length === 11")
    wide = "[...document.querySelectorAll('.formula.alone')].at(-1)"
    page.js(f"{wide}.scrollLeft = 1000; 0")
    assert page.js(f"{wide}.scrollLeft") > 0
    assert page.js("document.documentElement.scrollWidth") <= size[0]
    assert page.js(f"{_CONVERSATION}.scrollWidth <= {_CONVERSATION}.clientWidth")
    if _SCREENSHOTS:
        page.js(f"{wide}.scrollLeft = {_CONVERSATION}.scrollTop = 0; document.fonts.ready.then()")
        page.screenshot(Path(_SCREENSHOTS) / f"formulas-{scheme}-{size[0]}.png")
