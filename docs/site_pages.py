"""Brings files from outside of docs/ to the site, and mends links. A hook of MkDocs.

Files keep one home each: the README is the site's first page, BUILD.md the page for contributors.
Links work where the files are, and are rewritten here for where the site shows them; a link to a
file that the site does not show is left as text. Names of pages in code, as `docs/results.md`,
become links. The line `EVERY_COMPARATOR` becomes an entry of the reference for each comparator. A
paragraph that is a link to a recipe becomes the recipe.
"""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "BUILD.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}
"""Files of the repository, and where the site has them."""

FENCE = re.compile(r"^(```.*?^```$|(?: {4}[^\n]*\n)+)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\(([^()\s#:]+)(#[^()\s]*)?\)")
IMAGE = re.compile(r"(!\[[^\[\]]*\]\()([^()\s:]+)(\))")
NAME = re.compile(r"(?<![\[`])`((?:docs/)?[\w./-]+\.md)`(?![\]`])")


EVERY_COMPARATOR = "::: dynamiq_jax.contrib.*"
LISTED = re.compile(r"^from (dynamiq_jax\.contrib)\.\w+ import (\w+) as \2$", re.MULTILINE)


RECIPE = re.compile(r"^\[`(examples/recipes/\w+\.py)`\]\([^()\s]+\)$", re.MULTILINE)


def entries():
    """The reference's entries for the comparators that their package lists, in its order."""
    listed = LISTED.findall((ROOT / "dynamiq_jax" / "contrib" / "__init__.py").read_text())
    return "\n\n".join(f"::: {package}.{name}" for package, name in listed)


def recipe(match):
    """A block with the recipe's code, titled by its path."""
    code = (ROOT / match[1]).read_text()
    return f'```python title="{match[1]}"\n{code}```'


def on_files(files, config):
    """Adds the pages that live elsewhere."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Points links at pages of the site, lists the comparators, and includes recipes."""
    markdown = RECIPE.sub(recipe, markdown)
    markdown = markdown.replace(EVERY_COMPARATOR, entries())
    target = page.file.src_uri
    (source,) = [name for name, shown in PAGES.items() if shown == target] or [f"docs/{target}"]

    def shown(path):
        """Where the site has a file, as seen from this page; `None` if it does not."""
        path = os.path.normpath(path)
        found = PAGES.get(path) or (
            path.removeprefix("docs/") if path.startswith("docs/") else None
        )
        return found and os.path.relpath(found, os.path.dirname(target) or ".")

    def link(match):
        text, path, anchor = match[1], match[2], match[3] or ""
        to = shown(os.path.join(os.path.dirname(source), path))
        if to is None:
            if not (ROOT / os.path.dirname(source) / path).exists():
                return match[0]  # broken, for MkDocs to say so
            return text
        return f"[{text}]({to}{anchor})"

    def image(match):
        return f"{match[1]}{shown(os.path.join(os.path.dirname(source), match[2]))}{match[3]}"

    def name(match):
        to = shown(match[1])
        return match[0] if to is None else f"[`{match[1]}`]({to})"

    parts = FENCE.split(markdown)
    for i in range(0, len(parts), 2):
        parts[i] = NAME.sub(name, IMAGE.sub(image, LINK.sub(link, parts[i])))
    return "".join(parts)
