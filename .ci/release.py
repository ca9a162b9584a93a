"""Prepare a checkout for the release of its tag: links of the README, and the project's addresses.

No host is written in the repository: where it lives is taken from the environment of the workflow
(``GITHUB_SERVER_URL``, ``GITHUB_REPOSITORY``, ``GITHUB_REF_NAME``). Relative links of the README are rewritten to
that server, at the tag, and ``[project.urls]`` is added to ``pyproject.toml``. A tag that is not the version, or a link
to a file that is not there, ends it with status 1, and nothing is written.

Run: ``python .ci/release.py [FOLDER]``, in a checkout that is built and thrown away.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path

_LINK = re.compile(r"(!?)(\[[^\[\]]*\])\((?![a-z]+:)([^()\s]*)\)")
_IMAGES = (".png", ".svg", ".gif", ".jpg")


def main(root: Path, server: str, repository: str, tag: str) -> None:
    """Rewrite README.md and pyproject.toml in ``root``. Raises SystemExit with a message."""
    version = _version(root / "pccheck_async/__init__.py")
    if tag != f"v{version}":
        raise SystemExit(f"the tag is {tag}, the version is {version}")
    home = f"{server}/{repository}"
    readme, project = (root / name for name in ("README.md", "pyproject.toml"))
    missing: list[str] = []

    def absolute(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not (root / path).exists():
            missing.append(target)
        kind = "raw" if mark and path.endswith(_IMAGES) else "blob"
        address = f"{home}/{kind}/{tag}/{path or 'README.md'}{'#' if anchor else ''}{anchor}"
        return f"{mark}{text}({address})"

    text = _LINK.sub(absolute, readme.read_text(encoding="utf-8"))
    if missing:
        raise SystemExit(f"README.md links to what is not there: {', '.join(missing)}")
    urls = {
        "Source": home,
        "Documentation": f"{home}/blob/{tag}/examples/guide/index.md",
        "Changelog": f"{home}/blob/{tag}/examples/guide/changes.md",
        "Issues": f"{home}/issues",
    }
    table = "".join(f'{name} = "{address}"\n' for name, address in urls.items())
    settings = project.read_text(encoding="utf-8")
    before, scripts, after = settings.partition("[project.scripts]\n")
    if not scripts or "[project.urls]" in settings:
        raise SystemExit("pyproject.toml has no [project.scripts], or has [project.urls] already")
    readme.write_text(text, encoding="utf-8")
    project.write_text(f"{before}[project.urls]\n{table}\n{scripts}{after}", encoding="utf-8")


def _version(module: Path) -> str:
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(each) for each in node.targets] == ["__version__"]:
            return str(ast.literal_eval(node.value))
    raise SystemExit(f"{module} has no __version__")


if __name__ == "__main__":
    try:
        main(
            Path(sys.argv[1] if len(sys.argv) > 1 else "."),
            os.environ["GITHUB_SERVER_URL"],
            os.environ["GITHUB_REPOSITORY"],
            os.environ["GITHUB_REF_NAME"],
        )
    except KeyError as error:
        raise SystemExit(f"{error.args[0]} is not set: this runs in the workflow of a release") from None
