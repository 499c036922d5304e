"""Pictures: frozen numbers in, the bytes of an SVG, PNG or PDF file out.

One file per kind of picture; `style` says how each planner looks, `labels` where names are,
`scales` what an axis shows, `page` makes figures and bytes. Only this package knows matplotlib, the
extra `plot`, and imports it where it draws.
"""
