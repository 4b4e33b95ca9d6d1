"""Imports only go down the layers of docs/architecture.md, and a few calls are made nowhere."""

import ast
import re

import pytest
from package_tree import package_modules

PACKAGE = "inertiakv_jax"
MODULES = package_modules()

# Layer -> patterns of the modules in it (`*` is any rest). A module may import its own layer and
# lower ones. A module that matches none fails, so that its place is chosen when it is made.
LAYERS = {
    0: ["checks", "config", "files", "numerics", "rope_scaling", "typing"],
    1: ["pallas_kernels", "pallas_kernels.*", "state", "sampling", "sharding", "distributed"],
    2: [
        *("scoring", "aggregation", "eviction", "attention", "observation", "prefill_attention"),
        *(
            "budget",
            "learned_scorer",
            "prefill_method",
            "prompt_scoring",
            "policy",
            "methods",
            "policies",
        ),
    ],
    3: [
        *("shrinking", "reconstruction", "prompt_thinning"),
        *("prompt_input", "prefilling", "decode_input", "decode_step", "decoding"),
        *("text", "generation", "language_model"),
    ],
    4: ["models", "models.*", "weights", "weights.*", "checkpoint"],
    5: [
        *("configs", "eval", "eval.*"),
        *("cli", "commands", "commands.*", "__main__"),
        *("bench", "bench_peers", "demo", "demo_figure", "prose"),
        *("diagnostics", "diagnostics.*", "plan", "plan.*", "training", "training.*"),
        "",  # the package root
    ],
}
KERNEL_DOORS = ("attention", "eviction", "shrinking")  # the library modules that call kernels
SOURCE_FOLDERS = {"models", "eval", "pallas_kernels", "configs"}  # import names only under PACKAGE


def layer_of(module: str) -> int:
    name = module.removeprefix(PACKAGE).removeprefix(".")
    for layer, patterns in LAYERS.items():
        for pattern in patterns:
            if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name):
                return layer
    pytest.fail(f"{module} has no layer: give it one in LAYERS and in docs/architecture.md")


def imports(tree: ast.Module, known: set[str]) -> set[str]:
    """Modules that the file imports; `from a import b` is a.b where that is a module, else a."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in known else base)
    return found


def violations(module: str, source: str, known: set[str]) -> list[str]:
    """What in the file breaks the rules, one sentence each."""
    found = []
    tree = ast.parse(source)
    for target in sorted(imports(tree, known)):
        top = target.split(".")[0]
        if target.startswith("."):
            found.append(f"relative import {target}: write the whole name")
        elif top in SOURCE_FOLDERS:
            found.append(f"import {target}: write {PACKAGE}.{target}")
        elif top in ("pickle", "dill", "cloudpickle", "marshal"):
            found.append(f"import {target}: files are untrusted")
        elif top != PACKAGE:
            continue
        elif target == PACKAGE and module not in (PACKAGE, f"{PACKAGE}.__main__"):
            found.append(f"import of names from the package root: import {PACKAGE}.<module>")
        elif target not in known:
            found.append(f"import {target}: there is no such module")
        elif layer_of(target) > layer_of(module):
            found.append(
                f"imports up: layer {layer_of(module)} imports {target} of layer {layer_of(target)}"
            )
        elif enters_kernels(module, target):
            found.append(f"imports {target}: only {', '.join(KERNEL_DOORS)} call kernels")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += forbidden_call(node)
    return found


def enters_kernels(module: str, target: str) -> bool:
    kernels = f"{PACKAGE}.pallas_kernels"
    return (
        target.startswith(kernels)
        and not module.startswith(kernels)
        and layer_of(module) < 5
        and module.removeprefix(f"{PACKAGE}.") not in KERNEL_DOORS
    )


def forbidden_call(node: ast.Call) -> list[str]:
    found = []
    if ast.unparse(node.func) in ("jax.default_backend", "default_backend"):
        found.append("jax.default_backend(): it says 'cpu' while compiling ahead of time for a TPU")
    for keyword in node.keywords:
        value = keyword.value
        safe = isinstance(value, ast.Constant) and value.value is False
        if keyword.arg == "trust_remote_code" and not safe:
            found.append("trust_remote_code: no code is run from a model's folder")
        if keyword.arg == "allow_pickle" and not safe:
            found.append("allow_pickle: files are untrusted")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_module_keeps_the_rules(module):
    layer_of(module)
    assert violations(module, MODULES[module].read_text(), set(MODULES)) == []


KNOWN = {PACKAGE} | {
    f"{PACKAGE}.{name}"
    for name in (
        *("config", "state", "attention", "decoding", "eval.ruler", "models.decoder"),
        *("pallas_kernels.decode_attention", "pallas_kernels.decode_attention.api"),
    )
}


@pytest.mark.parametrize(
    ("module", "line", "expected"),
    [
        ("state", "from inertiakv_jax.decoding import step", "imports up"),
        ("state", "def f():\n    import inertiakv_jax.eval.ruler", "imports up"),
        ("state", "from inertiakv_jax import decoding", "imports up"),
        ("models.decoder", "from inertiakv_jax import load", "package root"),
        ("decoding", "import inertiakv_jax as ikv", "package root"),
        ("eval.ruler", "from models.decoder import Decoder", "write inertiakv_jax.models.decoder"),
        ("state", "from . import config", "relative import"),
        ("state", "from .config import ModelConfig", "relative import"),
        (
            "decoding",
            "from inertiakv_jax.pallas_kernels.decode_attention import api",
            "call kernels",
        ),
        ("decoding", "from inertiakv_jax.weights.nothing import load", "no such module"),
        ("weights.gguf", "import pickle", "untrusted"),
        ("weights.hub", "load(path, trust_remote_code=True)", "trust_remote_code"),
        ("weights.hub", "load(path, trust_remote_code=flag)", "trust_remote_code"),
        ("weights.hub", "numpy.load(path, allow_pickle=True)", "allow_pickle"),
        ("attention", "if jax.default_backend() == 'tpu': pass", "default_backend"),
    ],
)
def test_violation_is_found(module, line, expected):
    (sentence,) = violations(f"{PACKAGE}.{module}", line, KNOWN)
    assert expected in sentence


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("decoding", "from inertiakv_jax.state import KVState\nfrom inertiakv_jax import config"),
        ("attention", "from inertiakv_jax.pallas_kernels.decode_attention.api import attend"),
        ("cli", "from inertiakv_jax.models.decoder import Decoder"),
        ("weights.hub", "load(path, trust_remote_code=False)"),
        ("__main__", "import inertiakv_jax"),
    ],
)
def test_clean_line_passes(module, line):
    assert violations(f"{PACKAGE}.{module}", line, KNOWN) == []


def test_module_without_a_layer_fails():
    with pytest.raises(pytest.fail.Exception, match="has no layer"):
        layer_of(f"{PACKAGE}.utils")
