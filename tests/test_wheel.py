"""The wheel holds what the checkout holds, and works beside a user's own `models` folder."""

import ast
import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions

import pytest
from package_tree import ROOT, package_files, package_modules, setuptools_table

DISTRIBUTIONS = packages_distributions()  # import name -> the installed packages that bring it


def run(*command: object, **options) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.Path:
    """Built from a copy, so that the checkout stays as it is."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in setuptools_table()["package-dir"].values():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    # --no-build-isolation: setuptools is installed with the test extra, and no network is needed.
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "wheel", *flags, "-w", work, source)
    (built,) = work.glob("*.whl")
    return built


def names(wheel) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_file_of_the_package(wheel):
    packaged = {name for name in names(wheel) if ".dist-info/" not in name}
    assert packaged == set(package_files())


def test_wheel_is_typed_and_licensed(wheel):
    assert "inertiakv_jax/py.typed" in names(wheel)
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in names(wheel) if name.endswith(".dist-info/METADATA"))
        fields = email.message_from_bytes(archive.read(metadata))
        assert fields["License-Expression"] == "Apache-2.0"
        assert fields["Requires-Python"] == ">=3.11"
        (licence,) = (name for name in names(wheel) if name.endswith(".dist-info/licenses/LICENSE"))
        assert b"Apache License" in archive.read(licence)


def test_every_folder_of_modules_is_a_listed_package():
    folders = {name.rpartition("/")[0] for name in package_files() if name.endswith(".py")}
    packages = sorted(folder.replace("/", ".") for folder in folders)
    assert sorted(setuptools_table()["packages"]) == packages
    initialised = {name.removesuffix("/__init__.py") for name in package_files()}
    assert folders <= initialised, "a folder of modules without __init__.py"


def core_requirements() -> set[str]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {re.match(r"[\w.-]+", line)[0] for line in table["dependencies"]}


@pytest.mark.parametrize("module", sorted(package_modules()))
def test_imports_at_the_top_are_required_packages(module):
    """An optional package may only be imported by the function that needs it."""
    tree = ast.parse(package_modules()[module].read_text())
    for node in tree.body:
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [node.module]
        else:
            continue
        for top in {name.partition(".")[0] for name in imported} - sys.stdlib_module_names:
            providers = {name.lower().replace("_", "-") for name in DISTRIBUTIONS[top]}
            assert top == "inertiakv_jax" or providers & core_requirements(), top


def test_wheel_imports_beside_folders_of_the_same_names(wheel, tmp_path):
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    for folder in ("models", "eval", "configs", "pallas_kernels"):
        (elsewhere / folder).mkdir(parents=True)
        (elsewhere / folder / "__init__.py").write_text("raise ImportError('the user\\'s own')\n")
    modules = sorted(set(package_modules()) - {"inertiakv_jax.__main__"})
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    file = importlib.import_module(name).__file__\n"
        f"    assert file.startswith({str(installed)!r}), (name, file)\n"
        "print('imported', len(sys.argv))\n"
    )
    # PYTHONPATH comes before site-packages, where the editable install is.
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = run(sys.executable, "-c", script, cwd=elsewhere, env=environment)
    assert done.stdout == "imported 1\n"
