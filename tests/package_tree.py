"""The package's modules as they lie in the checkout, by the mapping of pyproject.toml."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def setuptools_table() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def package_files() -> dict[str, Path]:
    """Path inside the installed package -> file, of everything but what Python caches."""
    files = {}
    for package, folder in setuptools_table()["package-dir"].items():
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                inside = Path(*package.split("."), path.relative_to(ROOT / folder))
                files[inside.as_posix()] = path
    return files


def package_modules() -> dict[str, Path]:
    """Dotted name -> file; a package stands under its own name, not under `__init__`."""
    return {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for name, path in package_files().items()
        if name.endswith(".py")
    }
