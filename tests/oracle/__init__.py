"""A plain NumPy model of InertiaKV (arXiv 2609.03515), which shares no code with the library.

``llama`` is the transformer, ``method`` the eviction, ``tiny`` a small random model. Only NumPy and
the standard library are imported. Rows are run one at a time: a batch is compared row by row.
"""
