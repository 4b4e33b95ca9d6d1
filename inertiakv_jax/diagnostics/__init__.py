"""What policies keep of one text, step by step: measured, drawn, written down and replayed.

``trace`` runs policies over one forced continuation, ``replay`` forces a trace's evictions on a
cache anew. What is measured, and the file's schema: ``docs/diagnostics.md``.
"""

from inertiakv_jax.diagnostics.records import Boundary as Boundary
from inertiakv_jax.diagnostics.records import Trace as Trace
from inertiakv_jax.diagnostics.records import TracedRun as TracedRun
from inertiakv_jax.diagnostics.replaying import Replayed as Replayed
from inertiakv_jax.diagnostics.replaying import replay as replay
from inertiakv_jax.diagnostics.trace_file import read_trace as read_trace
from inertiakv_jax.diagnostics.trace_file import to_json as to_json
from inertiakv_jax.diagnostics.tracing import trace as trace
from inertiakv_jax.diagnostics.tracing import without_ema as without_ema
