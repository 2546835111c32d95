"""A size budget: which type each tensor gets. Read `search` first.

in   for each tensor, the types it may get, its bytes and its estimated loss in each (`sensitivity`)
out  types that fit the bytes (`allocation`), judged by whole trial models (`divergence`, `forward_passes`)
"""
