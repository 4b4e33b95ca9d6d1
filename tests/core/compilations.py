"""Which programs XLA compiles in a block of code, by jax's public monitoring events."""

import contextlib

import jax

BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compiled_programs():
    """Yields a list that grows by the name of each program compiled in the block."""
    names = []

    def listen(event, duration, **details):
        if event == BACKEND_COMPILE:
            names.append(details["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
