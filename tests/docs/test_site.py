"""The documentation builds without a warning, fetches nothing, and leaves nothing to be filled in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("packages/*/README.md"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds_and_its_generated_parts_are_filled(site: Path):
    configuration = (site / "configuration/index.html").read_text()

    assert "rollout.max_staleness" in configuration
    assert "reward/mean" in (site / "metrics/index.html").read_text()
    assert "generated:" not in configuration


def test_a_reader_without_network_sees_every_page_whole(site: Path):
    fetched = re.compile(r"<(?:script|link|img)\b[^>]*(?:src|href)=\"?(https?:[^\" >]+)")

    found = {page.relative_to(site): fetched.findall(page.read_text()) for page in site.rglob("*.html")}
    assert {page: urls for page, urls in found.items() if urls} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_placeholder_and_no_address_of_a_machine(page: Path):
    text = page.read_text()

    assert not re.search(r"\b(TODO|TBD|FIXME|XXX|lorem ipsum|coming soon)\b", text, flags=re.IGNORECASE)
    assert not re.search(r"(?<![\w.])/(root|home|work)/\w", text)


def test_every_make_target_that_the_readme_names_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b", (ROOT / "README.md").read_text().replace("make it", "")))

    assert {"quickstart", "test"} <= named <= targets
