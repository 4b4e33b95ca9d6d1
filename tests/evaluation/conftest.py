"""What the tests of evaluation need beyond the core."""

import pytest
from conftest import ON_CI


def needs(*packages: str) -> None:
    """Skips the module unless the packages of the extra 'eval' are there; on CI they must be."""
    for package in packages:
        if not ON_CI:
            pytest.importorskip(package, reason=f"{package} is not installed (extra 'eval')")
