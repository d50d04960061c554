"""`make docs` builds the site, and fails for dead links and similar faults. These tests need the extra ``docs``."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="the extra docs is not installed (make docs installs it)"
)


def build(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of the pages in ``tmp_path``/docs, into ``tmp_path``/site."""
    config = tmp_path / "mkdocs.yml"
    text = (ROOT / "mkdocs.yml").read_text()
    config.write_text(text.replace("tools/docs/site.py", str(ROOT / "tools/docs/site.py")))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "docs", tmp_path / "docs"))


def test_the_site_is_built_with_its_pictures(pages: Path, tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Missed targets" in (tmp_path / "site/performance.html").read_text()
    assert (tmp_path / "site/images/performance/router.svg").exists()


def test_dead_links_and_lonely_pages_and_what_comes_from_elsewhere_fail_the_build(pages: Path, tmp_path: Path) -> None:
    (pages / "lonely.md").write_text("# Nothing links here\n")
    with (pages / "configuration.md").open("a") as page:
        page.write("\n[a](nowhere.md) [b](commands.md#no-such-command)\n\n![c](https://example.org/c.png)\n")
    done = build(tmp_path)
    assert done.returncode != 0
    for problem in ("lonely.md", "'nowhere.md'", "'#no-such-command'", "https://example.org/c.png"):
        assert problem in done.stderr
