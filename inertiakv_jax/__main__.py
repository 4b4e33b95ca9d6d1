from inertiakv_jax.cli import main

main()
