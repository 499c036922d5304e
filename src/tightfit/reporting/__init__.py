"""Reports for people about plans and measurements, as text and as pictures.

Frozen values go in (graphs, plans, explanations, rows of numbers); text or the bytes of a file
come out, and nothing else happens. May import `graph` and `plan`, never PyTorch. `text` is for a
terminal; `html` makes one offline page; `pictures` makes SVG, PNG and PDF with matplotlib, the
extra `plot`, which nothing outside `pictures` knows.
"""
