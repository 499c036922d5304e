"""Models planned part by part, all parts within one budget.

Two kinds of model are: one whose parameters FSDP2 shards (`sharded`), and one that allows no
single graph (`fallback`). What runs between the parts stays eager and is measured (`ledger`).
"""
