"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011) in Python integers."""

MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int = 10) -> tuple[int, int, int, int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & MASK,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def random_word(seed: int, index: int) -> int:
    """The 32 random bits of element `index`: word 0, key = seed, counter = (index lo, index hi, 0, 0)."""
    return philox4x32((index & MASK, index >> 32, 0, 0), (seed & MASK, seed >> 32))[0]
