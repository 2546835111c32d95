"""A layer's weights and Hessian to codes. Read `hessian` first, then `gptq_solver`, `refine` and `two_sided`."""
