"""The documentation site: built offline, every link leads somewhere, every block was run, a browser shows it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import Browser, chromium

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from make_notebooks import cells_of  # noqa: E402
from make_notebooks import run as run_notebook  # noqa: E402
from page_blocks import blocks_of, run_page  # noqa: E402

DOCS = ROOT / "docs"
GUIDES = [DOCS / "index.md", *sorted((DOCS / "guides").glob("*.md"))]
OUTPUTS = json.loads((DOCS / "guides" / "outputs.json").read_text(encoding="utf-8"))
QUICK = {"many-gpus"}  # the others are run by `make test-full`
MKDOCS = importlib.util.find_spec("material") is not None


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    assert MKDOCS, "mkdocs-material is missing: run `make install`"
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    pages = [sys.executable, str(ROOT / "tools" / "make_site.py"), str(folder / "pages")]
    subprocess.run(pages, check=True, cwd=ROOT, env=environment, timeout=250)
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config = config.replace("build/pages", "pages").replace("build/site", "site")
    (folder / "mkdocs.yml").write_text(config, encoding="utf-8")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(build, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "site"


class Links(HTMLParser):
    """Addresses that a page leads to, those that a browser would load by itself, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        self.anchors |= {found[key] for key in ("id", "name") if key in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(found.get("href", ""))
        elif "src" in found:
            self.loaded.append(found["src"])


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(pages) > 40
    faults = []
    for path, found in pages.items():
        if path.name == "404.html":  # its addresses begin at the root of a server
            continue
        for address in [*found.links, *found.loaded]:
            parts = urlsplit(address)
            if parts.scheme or address.startswith("//"):
                inside = f"{path.relative_to(site)}: {address}"
                if address in found.loaded and parts.scheme != "data":
                    faults.append(f"{inside} is loaded from elsewhere")
                file = re.match(r"https://github\.com/spiritlevel/spiritlevel/blob/main/([^#]+)", address)
                if file and not (ROOT / unquote(file[1])).exists():
                    faults.append(f"{inside} is no file of the repository")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                faults.append(f"{path.relative_to(site)}: {address} is not there")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                faults.append(f"{path.relative_to(site)}: {address} has no such place")
    assert faults == []
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?https?:|@import", style.read_text(encoding="utf-8")), style


def test_the_reference_has_every_public_name(site: Path) -> None:
    import spiritlevel as sl

    shown = (site / "reference.html").read_text(encoding="utf-8")
    assert [name for name in sl._HOME if f">{name}<" not in shown and f">sl.{name}<" not in shown] == []


def test_every_measure_has_its_section(site: Path) -> None:
    import spiritlevel as sl

    for measure in sl.measures.MEASURES.values():
        page = (site / "measures" / f"{measure.family}.html").read_text(encoding="utf-8")
        assert f'id="{measure.name}"' in page


@pytest.mark.slow
def test_every_measure_has_its_picture() -> None:
    import spiritlevel as sl

    drawn = {path.stem for path in (DOCS / "pictures" / "measures").glob("*.svg")}
    assert drawn == set(sl.measures.MEASURES), "run `make docs`"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_what_a_guide_prints_belongs_to_its_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    assert text.count("```") == 2 * len(blocks)
    assert {block.kind for block in blocks} <= {"python", "sh", "py"}
    known = {block.key for block in blocks}
    stale = set(OUTPUTS.get(page.stem, {})) - known
    assert not stale, f"the outputs of {page.name} are of other code: run `python tools/make_outputs.py {page.stem}`"
    printing = {block.key for block in blocks if block.kind == "python" and re.search(r"^\s*print\(", block.code, re.M)}
    assert printing <= set(OUTPUTS[page.stem])
    if page.stem != "index":
        assert re.findall(r"^## (.*)$", text, re.M)[-1] == "What can go wrong"


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if page.stem in QUICK else [pytest.mark.slow], id=page.stem) for page in GUIDES],
)
@pytest.mark.timeout(1200)
def test_the_blocks_of_a_guide_run(page: Path, tmp_path: Path) -> None:
    printed = run_page(page, tmp_path)
    assert set(printed) == set(OUTPUTS[page.stem])


NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.py"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_that_of_its_script_with_output(path: Path) -> None:
    kept = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))
    assert (kept["nbformat"], kept["nbformat_minor"]) == (4, 5)
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in kept["cells"]]
    assert cells == cells_of(path.read_text(encoding="utf-8")), "run `python tools/make_notebooks.py`"
    assert len({cell["id"] for cell in kept["cells"]}) == len(cells)
    assert any(
        "image/svg+xml" in output.get("data", {}) for cell in kept["cells"] for output in cell.get("outputs", ())
    )
    assert len(NOTEBOOKS) == 3


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_less_than_three_minutes(path: Path) -> None:
    begin = time.process_time()
    made = run_notebook(path)
    assert time.process_time() - begin < 180
    kept = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))
    shapes = [[sorted(output.get("data", [])) for output in cell.get("outputs", ())] for cell in made["cells"]]
    assert shapes == [[sorted(output.get("data", [])) for output in cell.get("outputs", ())] for cell in kept["cells"]]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("browser")) as running:
        yield running


READY = "document.readyState === 'complete' && !!document.querySelector('.md-content')"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1300, 390], ids=["desktop", "phone"])
def test_a_browser_shows_it_without_an_error_or_a_request(site: Path, browser: Browser, dark: bool, width: int) -> None:
    for name in ("index.html", "guides/figures.html", "measures/curvature.html"):
        browser.show(site / name, width=width, dark=dark, phone=width < 500, ready=READY)
        assert browser.faults == [], name
        assert [address for address in browser.requests if not address.startswith("file:")] == []
        scheme = browser.evaluate("document.body.dataset.mdColorScheme")
        assert scheme == ("slate" if dark else "default")
        broken = "[...document.images].filter((image) => image.loading !== 'lazy' && !image.naturalWidth).length"
        assert browser.evaluate(broken) == 0
        assert browser.evaluate("document.scrollingElement.scrollWidth") <= width


def test_the_search_works_from_a_folder(site: Path, browser: Browser) -> None:
    browser.show(site / "index.html", ready=READY)
    browser.evaluate("document.querySelector('#__search').click()")
    browser.evaluate(
        "(() => { const box = document.querySelector('.md-search__input'); box.focus(); box.value = 'eigenvector'; "
        "for (const kind of ['keyup', 'input']) box.dispatchEvent(new Event(kind, {bubbles: true})); })()"
    )
    browser.wait("document.querySelectorAll('.md-search-result__link').length > 0", seconds=30)
    assert browser.faults == []
