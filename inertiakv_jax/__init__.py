"""InertiaKV in JAX: decode long prompts with a small KV cache that keeps what attention keeps."""

from inertiakv_jax import policies as policies
from inertiakv_jax.decode_step import step as step
from inertiakv_jax.decoding import decode as decode
from inertiakv_jax.generation import GenerationOutput as GenerationOutput
from inertiakv_jax.generation import GenerationStats as GenerationStats
from inertiakv_jax.generation import generate as generate
from inertiakv_jax.generation import stream as stream
from inertiakv_jax.language_model import LanguageModel as LanguageModel
from inertiakv_jax.policies import Policy as Policy
from inertiakv_jax.prefilling import prefill as prefill
from inertiakv_jax.sampling import Sampling as Sampling
from inertiakv_jax.sharding import make_mesh as make_mesh
from inertiakv_jax.state import KVState as KVState
from inertiakv_jax.weights.load import load as load
