"""The table of the page of questions: each with its section there and the section that answers it in full."""

from docs._generate.markdown import table

# (question, section of questions.md, section that answers it in full, its title)
QUESTIONS = (
    ("Which way is a scale rounded?", "scale-rounding", "scales/index.md#one-block-rule-by-rule", "Scale rules"),
    ("How is an element rounded?", "element-rounding", "elements.md#how-an-element-is-rounded", "Rounding of elements"),
    (
        "What is fixed by the standard, what is a choice?",
        "fixed-against-policy",
        "formats/mxfp4.md#fixed-and-policy",
        "MXFP4: fixed, and policy",
    ),
    ("What are the first and last E8M0 codes?", "e8m0-ends", "scales/ends.md#e8m0", "The ends of E8M0"),
    ("What is UE4M3?", "ue4m3", "scales/ends.md#ue4m3", "The ends of UE4M3"),
    ("Which E4M3 is it?", "e4m3-names", "elements.md#e4m3-has-several-names", "Names of E4M3"),
    (
        "Multiply by the global scale, or divide?",
        "global-scale-direction",
        "scales/tensor-scale.md#two-directions",
        "Two directions of the tensor scale",
    ),
    (
        "What is the global scale for?",
        "what-the-global-scale-does",
        "scales/tensor-scale.md#what-it-does",
        "The tensor scale",
    ),
    ("Which nibble comes first?", "nibble-order", "storage/index.md#nibbles", "Nibbles"),
    ("Where is a scale in the swizzled layout?", "swizzle", "storage/index.md#the-tile-of-scales", "The tile of scales"),
    (
        "Why is the last axis half as long?",
        "float4-x2-shape",
        "storage/index.md#logical-and-stored-shapes",
        "Logical and stored shapes",
    ),
    (
        "What does emulation get wrong?",
        "emulations-limits",
        "matmul/index.md#weight-only-and-emulation",
        "Weight-only, and emulation",
    ),
    (
        "What does tl.dot_scaled need?",
        "what-tl-dot-scaled-needs",
        "matmul/hardware.md#what-a-scaled-dot-of-triton-takes",
        "What Triton's dot_scaled takes",
    ),
    ("What is in an MXINT8 byte?", "mxint8", "elements/int8.md#bits", "INT8"),
    ("How many bits is a weight?", "bits-per-weight", "formats/nvfp4.md#bits-a-weight", "NVFP4: bits a weight"),
    (
        "What becomes of NaN, Inf, -0 and zeros?",
        "special-values",
        "formats/mxfp8_e4m3.md#special-codes-and-blocks",
        "MXFP8_E4M3: special codes and blocks",
    ),
    (
        "Which axis, and what of a short tail?",
        "axis-and-tail",
        "tutorials/quantize.md#along-which-axis",
        "Along which axis",
    ),
    (
        "Does a result depend on what else is in the batch?",
        "batches",
        "matmul/moe.md#a-token-does-not-depend-on-its-neighbours",
        "A token and its neighbours",
    ),
)


def contents() -> str:
    """The questions with links to their answers."""
    rows = [(f"[{question}](#{section})", f"[{title}]({page})") for question, section, page, title in QUESTIONS]
    return table(("question", "in full"), rows)
