"""What the commands share: meshes of devices, and jobs of several processes."""

from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from inertiakv_jax.commands.terminal import console

if TYPE_CHECKING:  # heavy, and not needed for --help
    from jax.sharding import Mesh

MeshOption = Annotated[str | None, arg(metavar="AXIS=SIZE,...", help_behavior_hint="")]
CoordinatorOption = Annotated[str | None, arg(metavar="HOST:PORT", help_behavior_hint="")]
NumberOption = Annotated[int | None, arg(help_behavior_hint="")]


def mesh_of(text: str | None, batch: int) -> "Mesh | None":
    """The mesh that an option names, said of a batch that does not fill it.

    Args:
      text: like "data=4,model=2"; None is one device.
      batch: rows decoded together.

    Raises:
      ValueError: as ``sharding.make_mesh``.
    """
    if text is None:
        return None
    from inertiakv_jax.sharding import make_mesh, missing_rows

    mesh = make_mesh(text)
    if (added := missing_rows(mesh, batch)) > 0:
        console().print(
            f"Mesh {text}: {added} more row{'s' * (added > 1)} for each batch of {batch}, so that "
            "axis data divides it; they only take time"
        )
    return mesh
