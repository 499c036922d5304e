"""Pictures: frozen numbers in, the bytes of an SVG, PNG or PDF file out.

One file per kind of picture; `style` has colours and markers of planners, `labels` places of names,
`scales` ranges of axes, `page` makes figures and bytes. Functions that return a picture take its
title and the suffix of its file, one of `SUFFIXES`. Only this package knows matplotlib, the extra
`plot`. It is imported where pictures are drawn; without it they raise `MissingExtra`.
"""
