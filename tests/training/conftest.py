"""The tiny model, loaded once."""

import pytest
from training.tiny_lm import write_model

import inertiakv_jax as ikv


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Path of the tiny model."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_lm(tiny_folder):
    """The tiny model as ``load`` gives it."""
    return ikv.load(tiny_folder)
