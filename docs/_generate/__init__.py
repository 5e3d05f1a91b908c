"""What the book of the formats computes: tables, drawings and whole pages, from the code and the committed records.

| file | what it decides |
|---|---|
| `pages.py` | how a page is rendered: expressions, code that runs, pages that exist only as records |
| `markdown.py` | tables, folds, how a number is written |
| `drawing.py` | pictures, as SVG that follows the theme |
| `formats.py` | a page for each element format and block format |
| `scales.py` | scale rules, tensor scales, their errors |
| `storage.py` | bytes, tiles, checkpoints |
| `products.py` | what a block dot needs, and what hardware gives |
| `producers.py` | where recipes differ, with the input that shows it |
| `measured.py` | the records in `benchmarks/results` |
| `links.py` | whether the links of the built site lead somewhere |
"""
