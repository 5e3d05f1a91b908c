"""Slow, plain second implementations, written from the contract alone; none of them imports mxref or torch arithmetic.

`rationals`  exact values and one correct rounding (`fractions.Fraction`)
`elements`   element codecs by search over exact values; the same search in float64, where every comparison is exact
`philox`     Philox4x32-10 in Python integers
`mx`         E8M0 scale rules and MX blocks, by rationals
`nvfp4`      NVFP4 orders as numpy float32 steps and by rationals
`activations` activations as numpy float32 steps
`products`   block dots and matmuls: exact integers, then numpy float32 additions
`experts`    a mixture of experts, one token and slot at a time

numpy float32 `+ - * /` on arrays are single IEEE 754 operations: that is what "numpy float32 steps" relies on.
"""
