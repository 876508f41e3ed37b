"""Markdown on the page at `/`: what it looks like, what it must never do, and how it grows."""

import json
from collections.abc import Iterator

import pytest

from tests.support.browser import Page
from tests.support.chat_page import (
    NewPage,
    answers,
    asked,
    finished,
    opened,
    send,
    use,
)
from tests.support.page_server import PageServer, running_page_server

_CONTENT = "document.querySelector('.answer .content')"


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


def html(page: Page) -> str:
    """Of the last answer."""
    text: str = page.js(
        "[...document.querySelectorAll('.answer .content')].at(-1).innerHTML.trim()"
    )
    return text


def test_markdown_becomes_elements(page: Page, server: PageServer) -> None:
    shown(
        page,
        server,
        "# Title\n\nA **bold** and *soft* `word`.\n\n1. one\n2. two\n   - deep\n\n"
        "| a | b |\n|---|--:|\n| 1 | 2 |\n\n> said\n\n- [x] done\n\n~~gone~~\n",
    )
    kinds = page.js(f"[...{_CONTENT}.querySelectorAll('*')].map((e) => e.localName)")
    wanted = {"h3", "strong", "em", "code", "ol", "ul", "table", "td", "blockquote", "s"}
    assert wanted <= set(kinds)
    assert (
        page.js(f"getComputedStyle({_CONTENT}.querySelector('td.to-right')).textAlign") == "right"
    )
    assert "☑ done" in answers(page)[0]


def test_code_is_coloured_and_copied_without_its_frame(page: Page, server: PageServer) -> None:
    code = 'def hello(name: str) -> None:\n    print(f"<b>{name}</b>")\n'
    shown(page, server, f"Here:\n\n```python\n{code}```\n")
    page.wait(f"{_CONTENT}.querySelector('code.coloured .hljs-keyword')")
    assert page.js(f"{_CONTENT}.querySelector('code').textContent") == code
    assert page.text(".code-bar span") == "python"
    page.call("Page.bringToFront")
    page.click(".copy-code")
    page.wait("document.querySelector('.copy-code').textContent === 'Copied'")
    page.write("#prompt", "")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="v", commands=["paste"])
    assert page.js("document.querySelector('#prompt').value") == code


def test_code_is_not_fetched_for_until_there_is_some(page: Page, server: PageServer) -> None:
    shown(page, server, "No code.")
    assert not any("highlight" in url for url in page.urls())
    shown(page, server, "```js\nlet a = 1;\n```")
    page.wait("document.querySelector('.hljs-keyword')")
    assert any("highlight" in url for url in page.urls())


def test_the_source_can_be_seen_and_is_what_is_copied(page: Page, server: PageServer) -> None:
    source = "A **bold** word."
    shown(page, server, source)
    assert answers(page) == ["A bold word."]
    page.call("Page.bringToFront")
    use(page, "Copy")
    page.write("#prompt", "")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="v", commands=["paste"])
    assert page.js("document.querySelector('#prompt').value") == source
    use(page, "Source")
    assert answers(page) == [source]
    use(page, "Source")
    assert answers(page) == ["A bold word."]


# Each sets `taken`, asks another host for something, or leaves the page, if it works.
_ATTACKS = [
    "<script>taken = 1</script>",
    "<img src=x onerror='taken = 1'>",
    "<svg onload='taken = 1'></svg>",
    "<svg><script>taken = 1</script></svg>",
    "<iframe src='javascript:parent.taken = 1'></iframe>",
    "<iframe srcdoc='<script>parent.taken = 1</script>'></iframe>",
    "<object data='javascript:taken = 1'></object>",
    "<embed src='https://evil.example/x.swf'>",
    "<details open ontoggle='taken = 1'><summary>x</summary></details>",
    "<video><source onerror='taken = 1'></video>",
    "<body onload='taken = 1'>",
    "<style>@import 'https://evil.example/x.css'; * { display: none }</style>",
    "<link rel=stylesheet href='https://evil.example/x.css'>",
    "<meta http-equiv=refresh content='0;url=https://evil.example/'>",
    "<base href='https://evil.example/'>",
    "<form action='https://evil.example/'><button>go</button></form>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;"
    "&lt;img src=1 onerror=taken=1&gt;'>",
    "<noscript><p title='</noscript><img src=x onerror=taken=1>'>",
    "<template><script>taken = 1</script></template>",
    "<a href='javascript:taken = 1'>x</a>",
    "[x](javascript:taken=1)",
    "[x](JaVaScRiPt:taken=1)",
    "[x](java\tscript:taken=1)",
    "[x](&#106;avascript:taken=1)",
    "[x](javascript&colon;taken=1)",
    "[x](<javascript:taken=1>)",
    "[x](data:text/html;base64,PHNjcmlwdD5wYXJlbnQudGFrZW49MTwvc2NyaXB0Pg==)",
    "[x](vbscript:taken)",
    "[x](file:///etc/passwd)",
    "[x](blob:https://evil.example/1)",
    "[x](//evil.example/)",
    "[x][1]\n\n[1]: javascript:taken=1",
    "<javascript:taken=1>",
    "[x](https://evil.example/ \"' onmouseover='taken=1\")",
    '[x](https://evil.example/"onmouseover="taken=1)',
    "![x](https://evil.example/pixel.png)",
    "![x](javascript:taken=1)",
    "![x](data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9InRha2VuPTEiLz4=)",
    '![x" onerror="taken=1](https://evil.example/x.png)',
    "![x](x onerror=taken=1)",
    "[![x](https://evil.example/pixel.png)](javascript:taken=1)",
    "![x][1]\n\n[1]: https://evil.example/ref.png",
    "```html\n<script>taken = 1</script>\n<img src=x onerror=taken=1>\n```",
    '```"><img src=x onerror=taken=1>\ncode\n```',
    "```js onload=taken=1\n</code></pre><script>taken = 1</script>\n```",
    "```__proto__\nx\n```\n\n```constructor\nx\n```",
    "    <script>taken = 1</script>",
    "`<script>taken = 1</script>`",
    "| <img src=x onerror=taken=1> | x |\n|:--|--:|\n| [y](javascript:taken=1) | z |",
    "# <img src=x onerror=taken=1>",
    "- [ ] <img src=x onerror=taken=1>",
    "> <script>taken = 1</script>",
    "&lt;img src=x onerror=taken=1&gt;",
    "<!--<img src='--><img src=x onerror=taken=1>'>",
    "<![CDATA[<script>taken = 1</script>]]>",
    "<?php echo 1 ?><script>taken = 1</script>",
    "<x onclick=taken=1 tabindex=1 autofocus onfocus=taken=1>",
    "\u202e<img src=x onerror=taken=1>\u0000<script>taken=1</script>",
    r"$\href{javascript:taken=1}{x}$ and $\url{https://evil.example/}$",
    r"$$\includegraphics{https://evil.example/x.png}$$",
    r"$\htmlId{chats}{x} \htmlClass{copy-code}{x} \htmlStyle{color: red}{x}$",
    r"$\htmlData{x=1}{x}$ $\text{<img src=x onerror=taken=1>}$ $\text{' style='x:y' \"}$",
    r"\(</annotation></semantics></math><script>taken = 1</script>\)",
    r"\[\text{</span><style>*{display:none}</style>}\]",
    r"$\color{red;background:url(https://evil.example/x)}{x}$",
    r"$\def\a{\a\a}\a$ $\unknown{<img src=x onerror=taken=1>}$",
    r"$\href{data:text/html,<script>parent.taken=1</script>}{x}$ $\href{ javascript:taken=1}{x}$",
    r"$\htmlData{onclick=taken=1}{x} \htmlClass{x\" onclick=\"taken=1}{x}$",
    r"$\includegraphics[width=1em,alt=\"x onerror=taken=1]{javascript:taken=1}$",
    r"$\def\htmlData#1{#1}\htmlData{<img src=x onerror=taken=1>}$",
    "<svg><a xlink:href='javascript:taken=1'><text>x</text></a></svg>",
    "<math><a xlink:href='javascript:taken=1'>x</a></math>",
    "[x](\u0001javascript:taken=1) [x](javascript\u200b:taken=1) [x](view-source:x)",
    "[x](https:javascript:taken=1) [x](mailto:a@b?body=<script>taken=1</script>)",
    "<https://evil.example/'onmouseover='taken=1> https://evil.example/\"onmouseover=\"taken=1",
    "<a id=chats><a id=conversation name=body><input id=prompt><button class=copy-code>",
]
_ELEMENTS = """
[...document.querySelectorAll("#conversation *, #chats-list *")].filter((e) =>
  e.matches("script, img, iframe, object, embed, style, link, meta, base, video, input, template, "
            + "noscript, form:not(.editor), .formula :is(a, [id], [class*=copy])")
  || [...e.attributes].some(({name}) => name.startsWith("on") || name === "src")
  || (!e.closest(".formula") && (e.matches("svg, math") || e.hasAttribute("style")))
  || (e.matches("a") && !/^(https?|mailto):/.test(e.getAttribute("href") ?? "https:"))
).map((e) => e.outerHTML)"""


@pytest.mark.parametrize("place", ["answer", "reasoning", "question"])
def test_nothing_that_a_text_contains_runs_or_loads(
    page: Page, server: PageServer, place: str
) -> None:
    """Rendered one by one, then together, so that no attack hides another."""
    answered = {"answer": "content", "reasoning": "reasoning_content"}.get(place)
    page.js("window.taken = 0; window.open = () => { taken = 1; }; 0")
    for i, attack in enumerate([*_ATTACKS, "\n\n".join(_ATTACKS)], start=1):
        server.says(attack, field=answered or "content")
        question = json.dumps("Go" if answered else attack)
        page.js(f"document.querySelector('#prompt').value = {question}; 0")
        page.js("document.querySelector('#ask').requestSubmit()")
        page.wait(f"document.querySelectorAll('.answer:not(.running)').length === {i}")
        page.wait("!document.querySelector('#send').hidden")
        if place == "reasoning":
            page.js("[...document.querySelectorAll('.reasoning')].at(-1).open = true; 0")
        assert page.js(_ELEMENTS) == [], attack
    for name in ("mouseover", "focus", "error", "load", "toggle"):  # what would set off a handler
        page.js(
            "document.querySelectorAll('#conversation *').forEach((e) =>"
            f"e.dispatchEvent(new Event({json.dumps(name)})));0"
        )
    assert page.js("window.taken") == 0
    assert page.js("location.href").startswith(server.url)
    ids = page.js("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))


def test_titles_of_conversations_stay_text(page: Page, server: PageServer) -> None:
    page.js("window.taken = 0")
    evil = "<img src=x onerror=taken=1>"
    server.says(evil)
    asked(page, evil)
    page.click("#chats-list .more")
    page.click("#chat-rename")
    page.write("#dialog-field", evil + "!")
    page.press("Enter")
    page.wait(f"document.querySelector('.chat').textContent === {json.dumps(evil + '!')}")
    assert page.js(_ELEMENTS) == [] and page.js("window.taken") == 0


def test_an_image_is_a_link_and_links_tell_nothing_about_this_page(
    page: Page, server: PageServer
) -> None:
    shown(page, server, "![a cat](https://evil.example/cat.png) and https://evil.example/x")
    links = page.js(
        f"[...{_CONTENT}.querySelectorAll('a')]"
        ".map((e) => [e.textContent, e.href, e.target, e.rel])"
    )
    rel = "noopener noreferrer nofollow"
    assert links == [
        ["Image: a cat", "https://evil.example/cat.png", "_blank", rel],
        ["https://evil.example/x", "https://evil.example/x", "_blank", rel],
    ]


def test_each_block_has_the_direction_of_its_script(page: Page, server: PageServer) -> None:
    shown(page, server, "שלום עולם\n\n- פריט\n\nLeft to right.\n\n```py\nx = 'שלום'\n```")
    sides = page.js(f"[...{_CONTENT}.children].map((e) => getComputedStyle(e).direction)")
    assert sides[:3] == ["rtl", "rtl", "ltr"]
    assert page.js(f"getComputedStyle({_CONTENT}.querySelector('pre')).direction") == "ltr"


# Sources whose parts change their meaning when more arrives.
_TRICKY = [
    "Text\n===\nmore\n---\n\n***bold***\n***\n- - -\n--not\n",
    "1. one\n\n2. two\n\n   inside\n\n10. ten\n\nout\n",
    "- a\n- b\n\n- loose\n  - deep\n\n    para\nlazy\n\n* other list\n+ third\n",
    "para\n# head\n#tag\npara\n> quote\nlazy\n\n> again\n>\n> - x\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 |\n\n| not a table |\n|--\nx | y\n--|--\n",
    "```py\nx = 1\n\n```\n~~~\n```\n~~~\n```unclosed\n\n\ncode",
    "    indented\n\n    more\ntext\n\tcode\n",
    "[later] and [also][later]\n\n- x\n\n[later]: https://a.example 'title'\n\nend [later]",
    "\r\nwindows\r\n\r\n- a\r\n- b\r\n\r\nend\rold mac\r\rx",
    "a\n\n\n\n\nb  \nc\\\nd\n\n\n",
    "<div>\n\n*x*\n</div>\n\n<!-- c\n\nd -->\n",
    "1\n2.\n3. x\n\n-\n  x\n\n+\n\ny\n",
    "Text\n$$\nx = a\n- b\n$$\nmore\n\n\\[\na\n= b\n\\] where $x$ is\nand\n\n$$ 5 and\n\nend",
    "para\n$$a$$\n$$b$$ is\n- $$\n  y\n\n  $$\n> \\[\n> z\n\\]\n$$\nunclosed\n# no head\n\nmore\n",
    "* a\n\n  ```\n  code\n  ```\n\n  > q\n\n1) b\n2) c\n1. d\n",
]


# The sources whose elements depend on how they arrived.
_GROWN = """(async () => {
  const sources = SOURCES;
  const { allElementsOf, definesLinks } = await import("/page/text/markdown.js");
  const { markdownView } = await import("/page/text/growing.js");
  const frames = [];
  window.requestAnimationFrame = (act) => frames.push(act);
  return sources.filter((source) => {
    const [grown, whole] = [document.createElement("div"), document.createElement("div")];
    const view = markdownView(grown, () => {});
    for (let end = 1; end <= source.length; end += 1) {
      view.grow(source.slice(0, end));
      for (const act of frames.splice(0)) act(Infinity);
    }
    const early = grown.innerHTML;
    view.finish(source);
    whole.append(...allElementsOf(source));
    return grown.innerHTML !== whole.innerHTML || whole.childNodes.length < 2
      || (early !== whole.innerHTML && !definesLinks(source));
  });
})()"""


def test_growing_text_ends_as_the_whole_text_does(page: Page) -> None:
    sources = [*_TRICKY, *(a + "\n" + b for a in _TRICKY for b in _TRICKY[:4])]
    assert page.js(_GROWN.replace("SOURCES", json.dumps(sources))) == []


# The length of a text, the longest part of it that was parsed at once, and the sum of all parts.
_PARSED = """(async () => {
  const { default: MarkdownIt } = await import("/page/vendor/markdown-it.js");
  const { markdownView } = await import("/page/text/growing.js");
  const lengths = [];
  const parse = MarkdownIt.prototype.parse;
  MarkdownIt.prototype.parse = function (source, env) {
    lengths.push(source.length);
    return parse.call(this, source, env);
  };
  const later = () => new Promise((resolve) => setTimeout(resolve));
  window.requestAnimationFrame = (act) => setTimeout(() => act(performance.now()));
  const paragraph = "Some *words* of a paragraph. ".repeat(8);
  const source = (paragraph + "\\n\\n- a\\n- b\\n\\n```js\\nlet a = 1;\\n```\\n\\n").repeat(300);
  const view = markdownView(document.createElement("div"), () => {});
  for (let end = 100; end < source.length; end += 100) {
    const before = lengths.length;
    view.grow(source.slice(0, end));
    while (lengths.length === before) await later();
  }
  view.finish(source);
  return [source.length, Math.max(...lengths), lengths.reduce((sum, each) => sum + each)];
})()"""


def test_the_work_for_a_long_text_is_linear(page: Page) -> None:
    """The parser gets the end of the text alone, however long the text has become."""
    length, longest, total = page.js(_PARSED)
    assert length > 75_000
    assert longest < 1000
    assert total < 6 * length


_PATHOLOGICAL = {
    "nested emphasis": "*" * 50_000 + "a" + "*" * 50_000,
    "strikes": "~~a" * 50_000,
    "code": "`a" * 50_000,
    "addresses": "http://a." * 50_000,
    "formulas": "$x$ " * 20_000,
    "openers": "[" * 50_000,
    "images": "![" * 50_000,
    "quotes": "> " * 5000 + "x",
    "lists": "".join("  " * i + "- x\n" for i in range(300)),
    "references": "".join(f"[a{i}]: x\n" for i in range(5000)),
    "tables": "|" * 3000 + "\n" + "|-" * 3000 + "\n" + ("|" * 3000 + "\n") * 20,
    "fences": "```\n" * 20_000,
    "comments": "<!--" * 50_000,
}
_TIME = """import("/page/text/markdown.js").then(({ allElementsOf }) => {
  const begin = performance.now();
  const root = document.createElement("div");
  root.append(...allElementsOf(TEXT));
  return [performance.now() - begin, root.textContent.length];
})"""


@pytest.mark.parametrize("name", _PATHOLOGICAL)
def test_a_text_made_to_be_slow_does_not_stop_the_page(page: Page, name: str) -> None:
    took_ms, _ = page.js(_TIME.replace("TEXT", json.dumps(_PATHOLOGICAL[name])))
    assert took_ms < 5000


def test_a_paragraph_of_any_length_is_shown_whole(page: Page) -> None:
    """A very long one without its emphasis."""
    for text in ("*a* " * 2000, "*a* " * 20_000):
        _, length = page.js(_TIME.replace("TEXT", json.dumps(text)))
        assert length >= text.count("a ") * 2 - 1


# The share of three seconds that a slow parser got, and how often.
_SHARE = """(async () => {
  const { default: MarkdownIt } = await import("/page/vendor/markdown-it.js");
  const { markdownView } = await import("/page/text/growing.js");
  let [parsedMs, num] = [0, 0];
  const view = markdownView(document.createElement("div"), () => { num += 1; });
  const parse = MarkdownIt.prototype.parse;
  MarkdownIt.prototype.parse = function (source, env) {
    const ms = performance.now();
    while (performance.now() < ms + 40);
    const tokens = parse.call(this, source, env);
    parsedMs += performance.now() - ms;
    return tokens;
  };
  const startMs = performance.now();
  for (let i = 1; performance.now() < startMs + 3000; i += 1) {
    view.grow("- item\\n".repeat(i));
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
  return [parsedMs / (performance.now() - startMs), num];
})()"""


def test_showing_one_long_list_leaves_most_of_the_time_to_the_page(page: Page) -> None:
    """A single block cannot be split, so it is shown less often as it grows."""
    share, num = page.js(_SHARE)
    assert share < 0.4 and num >= 3


def test_what_is_read_already_is_not_touched_while_more_arrives(
    page: Page, server: PageServer
) -> None:
    """So that a selection stays, and nothing flickers."""
    text = (
        "The first paragraph.\n\n```python\nlet_it = 'be'\n```\n\n"
        + "More and more. " * 40
        + "\n\nEnd."
    )
    server.says(text, pause_s=0.01)
    send(page, "Go on.")
    page.wait(f"{_CONTENT}?.children.length >= 3")
    page.js(
        f"window.first = {_CONTENT}.children[0]; window.changes = 0;"
        "new MutationObserver((all) => { changes += all.length; })"
        ".observe(first, {subtree: true, childList: true, characterData: true});"
        "getSelection().selectAllChildren(first); 0"
    )
    finished(page)
    assert page.js("window.changes") == 0
    assert page.js("String(getSelection())").strip() == "The first paragraph."


def test_a_growing_code_block_keeps_its_place(page: Page, server: PageServer) -> None:
    code = "".join(f"line_{i} = {'x' * 150!r}\n" for i in range(40))
    server.says(f"```python\n{code}```", pause_s=0.002)
    send(page, "Go on.")
    page.wait(f"{_CONTENT}?.querySelector('pre')?.textContent.length > 400")
    page.js(f"window.pre = {_CONTENT}.querySelector('pre'); pre.scrollLeft = 120; 0")
    page.wait("pre.textContent.length > 2000")
    assert page.js("[pre.isConnected, pre.scrollLeft]") == [True, 120]
    finished(page)
    assert page.js("[pre.isConnected, pre.scrollLeft]") == [True, 120]
