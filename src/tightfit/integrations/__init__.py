"""One line for users of other libraries: a file per library, which imports it and nothing above.

`hugging_face` and `lightning` are callbacks that fit the model their trainer trains and log planned
and measured bytes; `axolotl` is a plugin that adds the first. `inductor` and `torchtitan` are plans
that other compilers execute. `pytest_plugin` is a mark that limits what a test may allocate. May
import `api`, `allocator` and `torch_private`; no other package imports it.
"""
