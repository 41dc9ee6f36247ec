"""The documentation: links resolve, generated parts are whole, figures in the text are those on file."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from retrofox.config import Recipe
from retrofox.model.configuration_fox import SUPPORTED

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
        *(ROOT / "kernels").glob("*.md"),
    ]
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """docs/hooks.py, imported as mkdocs does it."""
    pytest.importorskip("mkdocs")
    sys.path.append(str(ROOT / "docs"))
    return importlib.import_module("hooks")


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(text: str) -> set[str]:
    """The anchors that headings make, as GitHub and mkdocs spell them."""
    titles = (re.sub(r"[^\w\s-]", "", title.lower()).strip() for title in re.findall(r"^#+ (.+)$", text, re.M))
    return {re.sub(r"\s+", "-", title) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_resolves(page, hooks):
    for link in LINK.findall(prose(page)):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else page.parent / path
        assert target.exists(), link
        if anchor and not anchor.startswith(("retrofox.", "fox_kernels.")):  # mkdocstrings makes those; mkdocs checks
            assert anchor in anchors(hooks.generated.fill_in(target.read_text(encoding="utf-8"))), link


def test_readme_is_short_and_has_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    assert "    make demo " in text
    assert "    make test " in text


def words(page: Path) -> int:
    """Words of a page without its generated parts."""
    text = page.read_text(encoding="utf-8")
    return len(re.sub(r"<!-- generated: [a-z_]+ -->.*?<!-- end -->", "", text, flags=re.S).split())


def test_the_pages_can_be_read_in_an_hour():
    assert sum(words(page) for page in (ROOT / "docs").glob("*.md")) <= 15_000
    assert words(ROOT / "docs" / "results.md") <= 3000


def test_every_file_and_folder_that_contributing_names_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:retrofox|kernels|tests|docs|benchmarks)/[\w./*-]*)`", text)
    assert len(named) > 20
    assert not [path for path in named if not list(ROOT.glob(path.rstrip("/")))]


def test_every_page_is_in_the_navigation():
    named = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = [page for entry in named for page in (next(iter(entry.values())) if isinstance(entry, dict) else [entry])]
    assert sorted(pages) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_commands_recipe_fields_and_families_are_on_their_pages(hooks):
    commands = hooks.generated.part("commands")
    assert all(f"## retrofox {name}\n" in commands for name in ("convert", "train", "recipes cp"))
    fields = hooks.generated.part("recipe_fields")
    assert all(f"| `{name}` |" in fields for name in Recipe.model_fields)
    assert "| `objective` | `distill` | required |" in fields
    families = hooks.generated.part("families")
    assert all(f"| `{name}` |" in families for name in SUPPORTED)
    assert f"{len(SUPPORTED)} model types" in families


def test_every_generated_part_is_used_and_an_unknown_one_is_refused(hooks):
    used = {name for page in PAGES for name in hooks.generated.MARK.findall(page.read_text(encoding="utf-8"))}
    assert used == set(hooks.generated.PARTS)
    for name in used:
        assert "|" in hooks.generated.part(name) or name == "readme_controls"  # a sentence
    with pytest.raises(ValueError, match="no generated part 'famlies'"):
        hooks.generated.fill_in("<!-- generated: famlies -->")


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_generated_parts_in_a_page_are_those_of_today(page, hooks):
    text = page.read_text(encoding="utf-8")
    assert hooks.generated.written(text) == text, "run python docs/generated.py"
    assert hooks.generated.written(hooks.generated.MARK.sub(r"<!-- generated: \1 -->", text)) == text
    assert "<!-- end -->" not in hooks.generated.fill_in(text)


def test_links_that_leave_the_folder_work_in_the_site(hooks):
    filled = hooks.on_page_markdown("![a](../benchmarks/cache-methods.png) [b](../kernels/LOG.md#decode)")
    assert filled == f"![a](figures/benchmarks-cache-methods.png) [b]({hooks.REPOSITORY}/kernels/LOG.md#decode)"
    with pytest.raises(ValueError, match=r"links to \.\./nothing"):
        hooks.on_page_markdown("[c](../nothing.md)")


def test_figures_in_the_text_are_those_on_file(hooks):
    """Each sentence is written anew from the JSON file, and has to stand in the page as it is."""
    figures = hooks.generated.figures
    times = figures.kernel_times()
    table = {shape: row for (shape, gates), row in times.items() if gates == "short" and shape[-1] in (64, 128)}

    def between(mine, other, gates="short"):
        ratios = [times[shape, gates][mine] / row[other] for shape, row in table.items()]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    wide = times[(2, 8192, 8, 8, 256), "short"]
    two, cudnn = (f"{wide['ours'] / wide[name]:.2f}" for name in ("FlashAttention-2, no gate", figures.CUDNN))
    short, opened = between("ours", figures.CUDNN), between("ours", figures.CUDNN, "open")
    throughput = figures.read("vllm-throughput.json")
    served = {
        length: sorted(
            f"{row['ratio']:.2f}"
            for row in throughput["rows"]
            if row["model"].startswith("default") and row["length"] == length
        )
        for length in (2048, 32768)
    }
    rows = figures.read("context_parallel.json")["rows"]
    shared = {row["case"]: f"{row['ratio']:.2f}" for row in rows if row["kind"] == "step"}

    def span(values):
        return f"{min(values):.2f} to {max(values):.2f}"

    arms = figures.read("retrofit/arms.json")["arms"]
    retrofit = hooks.generated.figures_of_retrofit
    trained = figures.read("train-windows.json")["rows"]
    speed = {(row["model"], row["window"]): row["tokens_per_second"] for row in trained}
    faster = {n: f"{speed['converted', n] / speed['control by document', n]:.2f}" for n in (16384, 32768)}
    judged = ("default", "default-seed1", "default-seed2", "yarn8-12M", "yarn8-12M-seed1")
    easy = {name: retrofit.found(arms[name], 32768) for name in judged}
    standard = {name: retrofit.found(arms[name], 32768, "standard") for name in ("lora-12M-yarn8", "lora-12M")}
    losses = {
        name: next(f"{bucket['mean']:.2f}" for bucket in arms[name]["loss_128k"] if bucket["from"] == 4096)
        for name in ("base", "default")
    }
    cells = figures.read("generate-horizon.json")["cells"]
    horizon = {
        cell: f"{row['fox']['gpu_ms'] / min(hooks.generated.figures_of_use.of_base(row)):.2f}"
        for cell, row in cells.items()
        if "fox" in row
    }
    first = figures.read("generate-first-token.json")["cells"].values()
    of_dense, of_base = (
        [f"{row['fox']['first_ms'] / row[peer]['first_ms']:.2f}" for row in first] for peer in ("fox-dense", "base")
    )
    at_16k = {
        name: " and ".join(retrofit.found(arms[seed], 16384) for seed in (name, f"{name}-seed1"))
        for name in ("theta5M-12M", "default")
    }
    ruler = {name: f"{100 * arms[name]['ruler'][-1]['mean']:.0f}" for name in judged}

    sentences = {
        "docs/serving.md": [
            f"passed in {figures.read('vllm-gpu.json')['seconds']:.0f} s",
        ],
        "README.md": [
            f"| {between('ours', 'official')} of the time | the official FoX kernel, its pruning off |",
            f"| {between('ours', 'fla')} of the time | flash-linear-attention (fla) |",
            f"| {short.split()[0]} to {opened.split()[-1]} of the time | cuDNN, no gates |",
            f"| the same, head dim 256 | {cudnn} of the time |",
            f"{len(SUPPORTED)} model types",
            f"{shared['dense']} of twice one GPU's speed; packed documents {shared['packed']}; "
            f"near and far heads {shared['gates']} |",
            f"| {' to '.join(served[32768])} / {' to '.join(served[2048])} of the tokens/s, two runs |",
            f"16 sequences after 32k / 128k, H200 | "
            f"{horizon['16 x 32768']} / {horizon['16 x 131072']} of the GPU's time",
            f"one sequence after 32k / 128k, H200 | {horizon['1 x 32768']} / {horizon['1 x 131072']} of the GPU's time",
            f"there the default has {losses['default']} at 4k-8k, the original {losses['base']}",
            f"at 32k YaRN x 8 has {ruler['yarn8-12M']} and {ruler['yarn8-12M-seed1']} % in two seeds, "
            f"the default {ruler['default']}, {ruler['default-seed1']} and {ruler['default-seed2']} in three.",
            f"| {faster[16384]} / {faster[32768]} of the tokens/s | no gates, one SDPA call a document |",
            f"| {of_dense[2]} / {of_dense[3]} of the time | itself without a horizon |",
            f"`rope_theta` 5e6 finds {at_16k['theta5M-12M']} % of the needles at 16k (gates {at_16k['default']} %)",
            f"at 32k YaRN x 8 finds {standard['lora-12M-yarn8']} %, gates {standard['lora-12M']} %",
        ],
        "docs/kernels.md": [
            f"{short} with short gates, {opened} with open gates",
            f"{two} of FlashAttention-2's time without gates, {cudnn} of cuDNN's",
            f"{between('ours', 'official')} of the official kernel's time and {between('ours', 'fla')} of fla's",
            f"takes {between('plain Triton', 'official')} of the official kernel's time",
        ],
        "docs/results.md": [
            f"Today they take {', '.join(of_dense[:3])} and {of_dense[3]} of no horizon's time, "
            f"{', '.join(of_base[:3])} and {of_base[3]} of the base's",
            f"The default finds {easy['default']}, {easy['default-seed1']} and {easy['default-seed2']} % of easy ones, "
            f"YaRN x 8 by the same stages {easy['yarn8-12M']} and {easy['yarn8-12M-seed1']}",
        ],
    }
    for page, wanted in sentences.items():
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        for sentence in wanted:
            assert sentence in text, page


def test_no_file_of_figures_names_a_folder_of_the_machine_it_was_made_on():
    for file in sorted((ROOT / "benchmarks").rglob("*.json")):
        assert not re.search(r"[\"'=\[ ,](/tmp|/work|/home|/root)/", file.read_text(encoding="utf-8")), file


def test_the_manifest_lists_each_document_once_with_its_digest():
    lines = (ROOT / "benchmarks" / "corpus" / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({row["id"] for row in rows}) == len(rows) == 2329
    wanted = ["file", "id", "source", "title", "author", "licence", "tokens", "sha256"]
    assert all(list(row) == wanted and re.fullmatch("[0-9a-f]{64}", row["sha256"]) for row in rows)
