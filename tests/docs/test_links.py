"""README.md, docs/ and the pages beside them: their links, paths and names lead somewhere."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = [README, *DOCS, CONTRIBUTING, *(ROOT / name for name in ("CHANGELOG.md", "RELEASING.md"))]
MAX_README_LINES = 150

_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
# A file or folder of this repository, such as `server/api/*/writer.py`.
_PATH = re.compile(r"`((?:server|engine|scheduler|loadtest|tests|configs|docker|docs)/[\w./*-]*)`")
_NAME = re.compile(r"`([A-Za-z_]+(?:\.[A-Za-z_]+)*)`")
_WORD = re.compile(r"\w+")
_ELSEWHERE = re.compile(r"[a-z]+:")  # https:, mailto:


def prose(page: Path) -> str:
    """The page without its blocks of code, in which nothing is a link or a heading."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """The targets of its relative links and pictures."""
    found = _LINK.findall(_CODE.sub("", prose(page)))
    return [target for target in found if not _ELSEWHERE.match(target)]


def anchors(page: Path) -> Iterator[str]:
    """Those of its headings, as GitHub makes them: a heading that comes again gets a number."""
    seen: Counter[str] = Counter()
    for heading in _HEADING.findall(prose(page)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        yield f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor
        seen[anchor] += 1


ALL_LINKS = [(page, target) for page in PAGES if page.exists() for target in links(page)]


@pytest.mark.parametrize(
    ("page", "target"), ALL_LINKS, ids=[f"{page.name}:{target}" for page, target in ALL_LINKS]
)
def test_a_link_leads_to_a_file_and_a_heading(page: Path, target: str) -> None:
    path, _, anchor = target.partition("#")
    there = (page.parent / path).resolve() if path else page
    assert there.exists(), f"{page.name} links to {target}, and there is no such file"
    if anchor:
        assert anchor in set(anchors(there)), f"{there.name} has no heading for #{anchor}"


@pytest.mark.parametrize("page", [README, *DOCS, CONTRIBUTING], ids=lambda page: page.name)
def test_a_path_that_a_page_names_exists(page: Path) -> None:
    named = _PATH.findall(page.read_text(encoding="utf-8"))
    assert [path for path in named if not any(ROOT.glob(path))] == []


def test_a_name_that_contributing_mentions_is_in_the_code() -> None:
    named = {
        name
        for dotted in _NAME.findall(CONTRIBUTING.read_text(encoding="utf-8"))
        for name in dotted.split(".")
    }
    folders = ("server", "engine", "scheduler", "loadtest", "tests")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    words = {path.stem for path in modules}
    words |= {word for path in modules for word in _WORD.findall(path.read_text(encoding="utf-8"))}
    assert len(named) > 30
    assert named - words == set()


def test_the_readme_is_short() -> None:
    num_lines = len(README.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_README_LINES


def test_the_readme_links_to_every_page() -> None:
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in links(README)}
    assert [page.name for page in DOCS if page.resolve() not in linked] == []


def test_anchors_are_made_as_github_makes_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# The `a` of [B, C](d.md)\n"
        "```bash\n# no heading\n```\n"
        "## On `penstock top`\n## Twice\n## Twice\n"
    )
    assert list(anchors(page)) == ["the-a-of-b-c", "on-penstock-top", "twice", "twice-1"]
