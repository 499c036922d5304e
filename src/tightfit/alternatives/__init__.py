"""Alternatives of operators: the registry and one file for each operator family.

In: a `Captured` step with one implementation of each op. Out: the step with those that
contributors offer, and with optional ops that make values only for these. A contributor sees an
`OpView` and returns an `Extension`. May import graph and capture.
"""
