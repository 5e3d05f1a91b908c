"""The table of the page of questions: each with its section there and the page that answers it in full."""

from docs._generate.markdown import table

# (question, section of questions.md, page, its title)
QUESTIONS = (
    ("Which way is a scale rounded?", "scale-rounding", "scales/index.md", "Scale rules"),
    ("How is an element rounded?", "element-rounding", "elements.md", "Element and scale formats"),
    ("What is fixed by the standard, what is a choice?", "fixed-against-policy", "formats.md", "Block formats"),
    ("What are the first and last E8M0 codes?", "e8m0-ends", "scales/ends.md", "The ends of the scale formats"),
    ("What is UE4M3?", "ue4m3", "scales/ends.md", "The ends of the scale formats"),
    ("Which E4M3 is it?", "e4m3-names", "elements.md", "Element and scale formats"),
    ("Multiply by the global scale, or divide?", "global-scale-direction", "scales/tensor-scale.md", "The tensor scale"),
    ("What is the global scale for?", "what-the-global-scale-does", "scales/tensor-scale.md", "The tensor scale"),
    ("Which nibble comes first?", "nibble-order", "storage/index.md", "Storage"),
    ("Where is a scale in the swizzled layout?", "swizzle", "storage/index.md", "Storage"),
    ("Why is the last axis half as long?", "float4-x2-shape", "storage/index.md", "Storage"),
    ("What does emulation get wrong?", "emulations-limits", "matmul/hardware.md", "What hardware does differently"),
    ("What does tl.dot_scaled need?", "what-tl-dot-scaled-needs", "matmul/hardware.md", "What hardware does differently"),
    ("What is in an MXINT8 byte?", "mxint8", "formats/mxint8.md", "MXINT8"),
    ("How many bits is a weight?", "bits-per-weight", "formats.md", "Block formats"),
    ("What becomes of NaN, Inf, -0 and zeros?", "special-values", "formats.md", "Block formats"),
    ("Which axis, and what of a short tail?", "axis-and-tail", "tutorials/quantize.md", "Quantize and look"),
    ("Does a result depend on what else is in the batch?", "batches", "matmul/moe.md", "Mixture-of-experts layers"),
)


def contents() -> str:
    """The questions with links to their answers."""
    rows = [(f"[{question}](#{section})", f"[{title}]({page})") for question, section, page, title in QUESTIONS]
    return table(("question", "in full"), rows)
