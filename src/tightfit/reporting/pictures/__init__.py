"""Pictures: frozen numbers in, the bytes of an SVG, PNG or PDF file out.

One file per kind of picture; `style` has colours and markers of planners, `labels` places of names,
`scales` ranges of axes, `page` makes figures and bytes. Only this package knows matplotlib, the
extra `plot`, and imports it where it draws.
"""
