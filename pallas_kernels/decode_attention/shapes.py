"""Decode shapes of real models, the same for tests, benchmark and tuning."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Heads:
    """The attention heads of one layer, on one device."""

    name: str
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # D

    @property
    def group(self) -> int:
        """G, query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes(self, batch: int, slots: int, itemsize: int) -> int:
        """Bytes of the keys and values of [B, K, S, D]: what decoding has to read."""
        return 2 * batch * self.num_kv_heads * slots * self.head_dim * itemsize

    def mass_bytes(self, batch: int, slots: int) -> int:
        """Bytes of the float32 mass [B, K, S]."""
        return 4 * batch * self.num_kv_heads * slots


LLAMA_3_1_8B = Heads("llama-3.1-8b", num_heads=32, num_kv_heads=8, head_dim=128)
LLAMA_3_3_70B_SHARD = Heads("llama-3.3-70b/8", num_heads=8, num_kv_heads=1, head_dim=128)
QWEN2_5_7B = Heads("qwen2.5-7b", num_heads=28, num_kv_heads=4, head_dim=128)
SMOLLM2_135M = Heads("smollm2-135m", num_heads=9, num_kv_heads=3, head_dim=64)

MODELS = (LLAMA_3_1_8B, LLAMA_3_3_70B_SHARD, QWEN2_5_7B, SMOLLM2_135M)
"""Llama-3.3-70B as one of eight devices sees it that share its kv heads out."""

SLOTS = (1024, 6402, 16384, 65536)
"""6,402: a budget of 6,401, a tenth of 64,010 tokens, and the slot the next token goes to."""

BATCHES = (1, 8, 32)
